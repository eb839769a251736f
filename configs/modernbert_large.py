"""ModernBERT-large (28 layers, width 1,024): the published size, and its first phase of training.

Command:     jaxlm pretrain configs/modernbert_large.py --run-dir runs/modernbert_large --data.source "gs://YOUR/*.jsonl.zst"
Hardware:    published: 8 H100 GPUs; here see `jaxlm plan configs/modernbert_large.py`
Parameters:  395,881,664 with the published vocabulary of 50,368
Result:      published, after all three phases: GLUE average 90.4 (answerdotai/ModernBERT-large, README)

The differences are those of modernbert_base.py, with a batch that grows from 448 to 4,928 rows over 10 billion tokens,
and three more. Theirs starts from the weights of base, tiled. At 900 billion tokens it went on at a learning rate of
5e-5, with a tenth of the weight decay. Here it decays from 5e-4 to 0 over all 1.7 trillion. The warm-up has 2 billion
tokens.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.modernbert import ModernBert
from jaxlm.objectives.masked_lm import MaskedLM

experiment = Experiment(
    objective=MaskedLM(
        model=ModernBert.published("large", dtype="bfloat16", dropout=0.1), mask_rate=0.3, input_format="packed"
    ),
    data=TextData(length=1024, tokenizer_kind="byte-bpe", vocab_size=50368),
    optimizer=OptimizerConfig(
        name="stable-adamw", learning_rate=5e-4, warmup_steps=396, b2=0.98, weight_decay=0.02, clip_norm=0.0
    ),
    train=TrainConfig(steps=340_650, batch_size=4928, log_every=100, eval_every=5_000, checkpoint_every=2_500),
)
