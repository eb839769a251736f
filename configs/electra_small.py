"""ELECTRA-small (12 layers, width 256, generator a quarter as wide): the published size and schedule.

Command:     jaxlm pretrain configs/electra_small.py --run-dir runs/electra_small --data.source "gs://YOUR/*.jsonl.zst"
Hardware:    published: one V100, four days; already decent after 200,000 steps, ten hours
Faster:      on a GPU, --objective.model.attention-dropout 0 selects cuDNN's attention; the paper's rate is 0.1
Parameters:  13,549,057 in the discriminator, 14,196,219 in training, with the published vocabulary of 30,522
Result:      published, MNLI dev: 78.9, of ELECTRA-Small-OWT, these steps on OpenWebText (google-research/electra,
             README). Its 77.4 on GLUE's test sets belongs to Small++: 4,000,000 steps, a generator of full width.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.electra import Electra
from jaxlm.objectives.replaced_tokens import ReplacedTokens

experiment = Experiment(
    objective=ReplacedTokens(model=Electra.published("small", dtype="bfloat16")),
    data=TextData(length=128, vocab_size=30522),
    optimizer=OptimizerConfig(learning_rate=5e-4, warmup_steps=10_000, bias_correction=False),
    train=TrainConfig(steps=1_000_000, batch_size=128, log_every=100, eval_every=10_000, checkpoint_every=5_000),
)
