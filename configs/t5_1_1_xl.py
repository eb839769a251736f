"""T5 1.1 XL: 24 + 24 layers, width 2048, 32 heads of 64, feed-forward 5120 (gated); inputs of 512, targets of 114.

Command:     jaxlm pretrain configs/t5_1_1_xl.py --run-dir runs/t5_1_1_xl --data.source "gs://YOUR/text/*.jsonl.zst"
Hardware:    a TPU pod slice with sharded parameters (see `jaxlm plan configs/t5_1_1_xl.py`)
Parameters:  2,849,757,184 with the published 32,128 rows of embedding

Adafactor at 1/sqrt(max(step, 10,000)), the batch size of 256 and the z-loss are those of T5X's preset for C4, without
dropout. A million steps are those of the 1.0 models.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.t5 import T5
from jaxlm.objectives.span_corruption import SpanCorruption
from jaxlm.parallel.mesh import MeshConfig

experiment = Experiment(
    objective=SpanCorruption(
        model=T5.published("1.1-xl", dtype="bfloat16", remat="full", loop_layers=True), z_loss=1e-4
    ),
    data=TextData(length=512, vocab_size=32128),
    optimizer=OptimizerConfig(
        name="adafactor", schedule="inverse-sqrt", learning_rate=0.01, warmup_steps=10_000, weight_decay=0.0,
        clip_norm=0.0,
    ),
    train=TrainConfig(steps=1_000_000, batch_size=256, log_every=100, eval_every=5000, checkpoint_every=5000),
    mesh=MeshConfig(data=1, fsdp=-1),
)
