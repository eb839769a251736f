"""XLNet-base (12 layers, width 768): the published size.

Command:     jaxlm pretrain configs/xlnet_base.py --run-dir runs/xlnet_base --data.source "gs://YOUR/text/*.jsonl.zst"
Hardware:    not published; see `jaxlm plan configs/xlnet_base.py`
Parameters:  116,750,336 with the published vocabulary of 32,000
Result:      published, MNLI dev after fine-tuning, one model: 86.8 (zihangdai/xlnet, README; of the released
             checkpoint, whose text was that of the large model)

The schedule of this size is not published. It is the large model's, with the batches of 2,048 rows of the official
README and half the learning rate.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.xlnet import Xlnet
from jaxlm.objectives.permutation_lm import PermutationLM

experiment = Experiment(
    objective=PermutationLM(model=Xlnet.published("base", activation="gelu_new", dtype="bfloat16")),
    data=TextData(length=512, vocab_size=32000),
    optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=40_000, bias_correction=False),
    train=TrainConfig(steps=500_000, batch_size=2048, log_every=100, eval_every=10_000, checkpoint_every=5_000),
)
