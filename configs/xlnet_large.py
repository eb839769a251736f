"""XLNet-large (24 layers, width 1024): the published size and schedule.

Command:     jaxlm pretrain configs/xlnet_large.py --run-dir runs/xlnet_large --data.source "gs://YOUR/text/*.jsonl.zst"
Hardware:    published: 512 TPU v3 chips, 5.5 days; here see `jaxlm plan configs/xlnet_large.py`
Parameters:  360,300,800 with the published vocabulary of 32,000
Result:      published, MNLI dev after fine-tuning, one model: 89.8 (zihangdai/xlnet, README)
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.xlnet import Xlnet
from jaxlm.objectives.permutation_lm import PermutationLM

experiment = Experiment(
    objective=PermutationLM(model=Xlnet.published("large", activation="gelu_new", dtype="bfloat16")),
    data=TextData(length=512, vocab_size=32000),
    optimizer=OptimizerConfig(learning_rate=4e-4, warmup_steps=40_000, bias_correction=False),
    train=TrainConfig(steps=500_000, batch_size=8192, log_every=100, eval_every=10_000, checkpoint_every=5_000),
)
