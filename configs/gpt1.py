"""GPT-1 117M (12 layers, width 768): the published size and recipe.

Command:     jaxlm pretrain configs/gpt1.py --run-dir runs/gpt1 --data.source "gs://YOUR/books/*.jsonl.zst"
Hardware:    published: 8 GPUs for a month
Faster:      on a GPU, --objective.model.attention-dropout 0 selects cuDNN's attention; the paper's rate is 0.1
Parameters:  116,534,784 with the published vocabulary of 40,478
Result:      published, BooksCorpus: perplexity 18.4 per token (Radford et al. 2018, section 4.1)

The published vocabulary is a BPE of lower-case words without the end symbol that this objective needs, so a vocabulary
of the same size is trained. 3,000,000 steps are about the paper's 100 epochs of BooksCorpus: 800 million words, at 1.2
tokens per word. Attention stays within a document. The published figure is for a plain stream of documents,
`--objective.plain-stream True`.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.gpt1 import Gpt1
from jaxlm.objectives.causal_lm import CausalLM

experiment = Experiment(
    objective=CausalLM(model=Gpt1(dtype="bfloat16")),
    data=TextData(length=512, tokenizer_kind="bpe", vocab_size=40478),
    optimizer=OptimizerConfig(
        learning_rate=2.5e-4, warmup_steps=2_000, schedule="cosine", eps=1e-8, weight_decay=0.01, clip_norm=1.0
    ),
    train=TrainConfig(steps=3_000_000, batch_size=64, log_every=100, eval_every=10_000, checkpoint_every=10_000),
)
