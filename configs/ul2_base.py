"""UL2 at the size of T5 1.1 base: 12 + 12 layers, width 768, feed-forward 2048 (gated), with a mixture of denoisers.

Command:     jaxlm pretrain configs/ul2_base.py --run-dir runs/ul2_base --data.source "gs://YOUR/text/*.jsonl.zst"
Hardware:    one accelerator or a pod slice (see `jaxlm plan configs/ul2_base.py`)
Parameters:  247,577,856 with the published 32,128 rows of embedding

Steps, batch size and Adafactor at 1/sqrt(max(step, 10,000)) are those of the comparisons of Tay et al. 2022, whose
models have SiLU instead of GELU. In the paper each denoiser has its own lengths; here all have inputs of at most 512
and targets of at most 342 tokens.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.t5 import T5
from jaxlm.objectives.mixture_of_denoisers import MixtureOfDenoisers

experiment = Experiment(
    objective=MixtureOfDenoisers(model=T5.published("1.1-base", dtype="bfloat16"), z_loss=1e-4),
    data=TextData(length=512, vocab_size=32128),
    optimizer=OptimizerConfig(
        name="adafactor", schedule="inverse-sqrt", learning_rate=0.01, warmup_steps=10_000, weight_decay=0.0,
        clip_norm=0.0,
    ),
    train=TrainConfig(steps=500_000, batch_size=128, log_every=100, eval_every=5000, checkpoint_every=5000),
)
