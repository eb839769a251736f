"""Ettin encoder 17M (7 layers, width 256): the published size, and its first phase of training.

Command:     jaxlm pretrain configs/ettin_encoder_17m.py --run-dir runs/ettin_encoder_17m --data.source "gs://YOUR/*.jsonl.zst"
Hardware:    see `jaxlm plan configs/ettin_encoder_17m.py`
Parameters:  16,913,600 with the published vocabulary of 50,368

Learning rate, betas, batch, masks and tokens (1.7 trillion) are those of the first published phase. The learning rate
decays linearly to 0 over this phase. Theirs is constant, and two phases with rows of 7,999 tokens follow, 250 and 50
billion tokens long, which decay; masks are 15 % in the last one. StableAdamW clips each matrix by itself, theirs query,
key and value together, and the two halves of the gated feed-forward; weight decay at the peak is the same. The batch
grows to 4,608 rows over the first 125 billion tokens there, and the warm-up has its number of tokens here. Rows are
packed; theirs are not. The base of rotary positions is 160,000 from the start. [CLS] and [SEP] are never masked, and
random tokens are never special; theirs may be. There is no dropout, as in the released configurations.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.modernbert import ModernBert
from jaxlm.objectives.masked_lm import MaskedLM

experiment = Experiment(
    objective=MaskedLM(
        model=ModernBert.published("ettin-17m", dtype="bfloat16"), mask_rate=0.3, input_format="packed"
    ),
    data=TextData(length=1024, tokenizer_kind="byte-bpe", vocab_size=50368),
    optimizer=OptimizerConfig(
        name="stable-adamw", learning_rate=3e-3, warmup_steps=848, b2=0.98, weight_decay=0.1, clip_norm=0.0
    ),
    train=TrainConfig(steps=360_277, batch_size=4608, log_every=100, eval_every=5_000, checkpoint_every=2_500),
)
