"""ELECTRA-base (12 layers, width 768, generator a third as wide): the published size and schedule.

Command:     jaxlm pretrain configs/electra_base.py --run-dir runs/electra_base --data.source "gs://YOUR/*.jsonl.zst"
Hardware:    see `jaxlm plan configs/electra_base.py`
Faster:      on a GPU, --objective.model.attention-dropout 0 selects cuDNN's attention; the paper's rate is 0.1
Parameters:  109,483,009 in the discriminator, 119,386,427 in training, with the published vocabulary of 30,522
Result:      none for these steps in google-research/electra: its README's 82.7 on GLUE's test sets belongs to Base++,
             trained for longer
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.electra import Electra
from jaxlm.objectives.replaced_tokens import ReplacedTokens

experiment = Experiment(
    objective=ReplacedTokens(model=Electra.published("base", dtype="bfloat16")),
    data=TextData(length=512, vocab_size=30522),
    optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=10_000, bias_correction=False),
    train=TrainConfig(steps=766_000, batch_size=256, log_every=100, eval_every=10_000, checkpoint_every=5_000),
)
