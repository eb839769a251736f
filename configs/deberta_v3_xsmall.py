"""DeBERTa v3 xsmall (12 layers, width 384, a generator of half the depth): the published size and schedule.

Command:     jaxlm pretrain configs/deberta_v3_xsmall.py --run-dir runs/deberta --data.source "gs://YOUR/*.jsonl.zst"
Hardware:    see `jaxlm plan configs/deberta_v3_xsmall.py`
Parameters:  70,831,105 in the discriminator, 131,339,749 in training, with the published vocabulary of 128,100
Result:      published, MNLI dev: 88.1, of deberta-v3-xsmall, trained by the paper's recipe (microsoft/DeBERTa, README)

Steps, batch, learning rate and weights of the losses are those of the code (microsoft/DeBERTa, rtd.sh). It differs
from the paper and from this preset:

- It weights the discriminator's loss by 10, the paper by 50. Since no parameter has both losses, Adam hardly notices.
- It masks one token in each window of 6 until 15 % are masked, so never the end of a full row. Here masks are uniform.
- It updates the generator before the discriminator reads its samples, and clips each network's gradient by itself. Here
  one step updates both, and their joint norm is clipped.
- Its weights begin from a normal distribution that is not cut; here it is cut at two standard deviations, as BERT's.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.deberta import DebertaV3
from jaxlm.objectives.replaced_tokens import ReplacedTokens

experiment = Experiment(
    objective=ReplacedTokens(
        model=DebertaV3.published("xsmall", dtype="bfloat16"), mask_share=1.0, discriminator_weight=10.0,
        two_segments=False, short_rate=0.0,
    ),
    data=TextData(length=512, vocab_size=128100),
    optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=10_000, bias_correction=False),
    train=TrainConfig(steps=1_000_000, batch_size=64, log_every=100, eval_every=10_000, checkpoint_every=5_000),
)
