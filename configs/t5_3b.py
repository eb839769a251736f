"""T5 1.0 3B: 24 + 24 layers, width 1024, 32 heads of 128, feed-forward 16384; inputs of 512, targets of 114.

Command:     jaxlm pretrain configs/t5_3b.py --run-dir runs/t5_3b --data.source "gs://YOUR/text/*.jsonl.zst"
Hardware:    a TPU pod slice with sharded parameters (see `jaxlm plan configs/t5_3b.py`)
Faster:      on a GPU, --objective.model.attention-dropout 0 selects cuDNN's attention
Parameters:  2,851,598,336 with the published 32,128 rows of embedding

Adafactor at 1/sqrt(max(step, 10,000)) and a million steps of 2,048 sequences, as for the final models of Raffel et al.
2019. Their data also has supervised tasks; this preset has the unsupervised part. The z-loss is T5X's.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.t5 import T5
from jaxlm.objectives.span_corruption import SpanCorruption
from jaxlm.parallel.mesh import MeshConfig

experiment = Experiment(
    objective=SpanCorruption(model=T5.published("3b", dtype="bfloat16", remat="full", loop_layers=True), z_loss=1e-4),
    data=TextData(length=512, vocab_size=32128),
    optimizer=OptimizerConfig(
        name="adafactor", schedule="inverse-sqrt", learning_rate=0.01, warmup_steps=10_000, weight_decay=0.0,
        clip_norm=0.0,
    ),
    train=TrainConfig(steps=1_000_000, batch_size=2048, log_every=100, eval_every=5000, checkpoint_every=5000),
    mesh=MeshConfig(data=1, fsdp=-1),
)
