"""T5 1.1 small: 8 + 8 layers, width 512, 6 heads of 64, feed-forward 1024 (gated); inputs of 512, targets of 114.

Command:     jaxlm pretrain configs/t5_1_1_small.py --run-dir runs/t5_1_1_small --data.source "gs://YOUR/text/*.jsonl.zst"
Hardware:    one accelerator or a pod slice (see `jaxlm plan configs/t5_1_1_small.py`)
Parameters:  76,961,152 with the published 32,128 rows of embedding

Adafactor at 1/sqrt(max(step, 10,000)), the batch size of 256 and the z-loss are those of T5X's preset for C4, without
dropout. A million steps are those of the 1.0 models.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.t5 import T5
from jaxlm.objectives.span_corruption import SpanCorruption

experiment = Experiment(
    objective=SpanCorruption(
        model=T5.published("1.1-small", dtype="bfloat16"), z_loss=1e-4
    ),
    data=TextData(length=512, vocab_size=32128),
    optimizer=OptimizerConfig(
        name="adafactor", schedule="inverse-sqrt", learning_rate=0.01, warmup_steps=10_000, weight_decay=0.0,
        clip_norm=0.0,
    ),
    train=TrainConfig(steps=1_000_000, batch_size=256, log_every=100, eval_every=5000, checkpoint_every=5000),
)
