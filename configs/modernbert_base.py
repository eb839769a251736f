"""ModernBERT-base (22 layers, width 768): the published size, and its first phase of training.

Command:     jaxlm pretrain configs/modernbert_base.py --run-dir runs/modernbert_base --data.source "gs://YOUR/*.jsonl.zst"
Hardware:    published: 8 H100 GPUs; here see `jaxlm plan configs/modernbert_base.py`
Parameters:  149,655,232 with the published vocabulary of 50,368
Result:      published, after all three phases: GLUE average 88.4 (answerdotai/ModernBERT-base, README)

Learning rate, betas, batch, masks and tokens (1.7 trillion) are those of the first published phase. It differs from the
published training as follows. The learning rate decays linearly to 0, over this phase; theirs is constant, and two
phases with rows of 8,192 tokens follow, 250 and 50 billion tokens long, of which the last decays. StableAdamW clips
the updates of query, key and value apart, and those of the two halves of the gated feed-forward; theirs are joined.
Their weight decay of 1e-5 a step at the peak is 0.0125 of the learning rate, as here. The batch is 4,608 rows from the
start; theirs grows from 768 over 50 billion tokens, and the warm-up here has its 3 billion tokens. The base of rotary
positions of global layers is 160,000 from the start, theirs 10,000 in this phase. Documents that do not fit a packed
row go on in another one; theirs are truncated. [CLS] and [SEP] are never masked, and random tokens are never special;
theirs may be. Held-out loss is at 30 % masks, theirs at 15 %. The vocabulary is trained here; theirs is OLMo's.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.modernbert import ModernBert
from jaxlm.objectives.masked_lm import MaskedLM

experiment = Experiment(
    objective=MaskedLM(
        model=ModernBert.published("base", dtype="bfloat16", dropout=0.1), mask_rate=0.3, input_format="packed"
    ),
    data=TextData(length=1024, tokenizer_kind="byte-bpe", vocab_size=50368),
    optimizer=OptimizerConfig(
        name="stable-adamw", learning_rate=8e-4, warmup_steps=636, b2=0.98, weight_decay=0.0125, clip_norm=0.0
    ),
    train=TrainConfig(steps=364_304, batch_size=4608, log_every=100, eval_every=5_000, checkpoint_every=2_500),
)
