"""GPT-2 124M (12 layers, width 768): the published size and context, with nanoGPT's open recipe.

Command:     jaxlm pretrain configs/gpt2.py --run-dir runs/gpt2 --data.source "gs://YOUR/text/*.jsonl.zst"
             (on one GPU add --train.accumulate 16)
Hardware:    nanoGPT trains this shape in about 4 days on 8 A100s
Parameters:  124,439,808 with the published vocabulary of 50,257
Result:      published, OpenWebText: held-out loss about 2.85 after 300 billion tokens (karpathy/nanoGPT, README)

For the published vocabulary, add --data.tokenizer FOLDER with GPT-2's encoder.json and vocab.bpe. Steps, schedule,
betas and weight decay are nanoGPT's, whose batch is 480 rows. The original's batch is 512 rows; its other settings are
not published. Attention stays within a document. The published figure is for a plain stream of documents,
`--objective.plain-stream True`.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.gpt2 import Gpt2
from jaxlm.objectives.causal_lm import CausalLM

experiment = Experiment(
    objective=CausalLM(model=Gpt2.published("small", dtype="bfloat16")),
    data=TextData(length=1024, vocab_size=50257),
    optimizer=OptimizerConfig(
        learning_rate=6e-4, warmup_steps=2_000, schedule="cosine", final_share=0.1, b2=0.95, eps=1e-8,
        weight_decay=0.1,
    ),
    train=TrainConfig(steps=600_000, batch_size=512, log_every=100, eval_every=2_000, checkpoint_every=2_000),
)
