"""DeBERTa v3 large (24 layers, width 1024, a generator of half the depth): the published size and schedule.

Command:     jaxlm pretrain configs/deberta_v3_large.py --run-dir runs/deberta --data.source "gs://YOUR/*.jsonl.zst"
Hardware:    see `jaxlm plan configs/deberta_v3_large.py`
Parameters:  435,064,833 in the discriminator, 719,626,341 in training, with the published vocabulary of 128,100
Result:      published, MNLI dev: 91.8, of deberta-v3-large, trained by the paper's recipe (microsoft/DeBERTa, README)

Steps, batch, learning rate and weights of the losses are those of the code (microsoft/DeBERTa, rtd.sh), which differs
from the paper and from jaxlm as deberta_v3_xsmall.py says.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.deberta import DebertaV3
from jaxlm.objectives.replaced_tokens import ReplacedTokens

experiment = Experiment(
    objective=ReplacedTokens(
        model=DebertaV3.published("large", dtype="bfloat16"), mask_share=1.0, discriminator_weight=10.0,
        two_segments=False, short_rate=0.0,
    ),
    data=TextData(length=512, vocab_size=128100),
    optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=10_000, bias_correction=False),
    train=TrainConfig(steps=1_000_000, batch_size=256, log_every=100, eval_every=10_000, checkpoint_every=5_000),
)
