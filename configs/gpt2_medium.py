"""GPT-2 355M (24 layers, width 1,024): the published size and context, with nanoGPT's open recipe.

Command:     jaxlm pretrain configs/gpt2_medium.py --run-dir runs/gpt2_medium --data.source "gs://YOUR/text/*.jsonl.zst"
             (on one GPU add --train.accumulate 32)
Hardware:    not published; see `jaxlm plan configs/gpt2_medium.py`
Parameters:  354,823,168 with the published vocabulary of 50,257
Result:      published, OpenWebText: 2.84 for the released weights (karpathy/nanoGPT, README)

For the published vocabulary, add --data.tokenizer FOLDER with GPT-2's encoder.json and vocab.bpe. The learning rate is
GPT-3's for this size; the rest is nanoGPT's recipe for 124M. Attention stays within a document. The published figure is
for a plain stream of documents, `--objective.plain-stream True`.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.gpt2 import Gpt2
from jaxlm.objectives.causal_lm import CausalLM

experiment = Experiment(
    objective=CausalLM(model=Gpt2.published("medium", dtype="bfloat16", remat="dots")),
    data=TextData(length=1024, vocab_size=50257),
    optimizer=OptimizerConfig(
        learning_rate=3e-4, warmup_steps=2_000, schedule="cosine", final_share=0.1, b2=0.95, eps=1e-8,
        weight_decay=0.1,
    ),
    train=TrainConfig(steps=600_000, batch_size=512, log_every=100, eval_every=2_000, checkpoint_every=2_000),
)
