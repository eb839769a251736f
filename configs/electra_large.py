"""ELECTRA-large (24 layers, width 1024, generator a quarter as wide): the published size and schedule.

Command:     jaxlm pretrain configs/electra_large.py --run-dir runs/electra_large --data.source "gs://YOUR/*.jsonl.zst"
Hardware:    see `jaxlm plan configs/electra_large.py`
Faster:      on a GPU, --objective.model.attention-dropout 0 selects cuDNN's attention; the paper's rate is 0.1
Parameters:  335,142,913 in the discriminator, 354,655,291 in training, with the published vocabulary of 30,522
Result:      none for these 400,000 steps in google-research/electra: its README's 85.2 on GLUE's test sets belongs to
             the model of 1,750,000 steps
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.electra import Electra
from jaxlm.objectives.replaced_tokens import ReplacedTokens

experiment = Experiment(
    objective=ReplacedTokens(model=Electra.published("large", dtype="bfloat16"), mask_rate=0.25),
    data=TextData(length=512, vocab_size=30522),
    optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=10_000, bias_correction=False),
    train=TrainConfig(steps=400_000, batch_size=2048, log_every=100, eval_every=10_000, checkpoint_every=5_000),
)
