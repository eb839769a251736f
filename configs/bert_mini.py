"""BERT-mini (4 layers, width 256): the published size, for two CPU cores.

Command:     jaxlm pretrain configs/bert_mini.py --run-dir runs/bert_mini --data.source "text/*.jsonl.xz"
Hardware:    two CPU cores
Faster:      on a TPU or GPU, --objective.model.dtype bfloat16;
             on a GPU --objective.model.attention-dropout 0 besides, which selects cuDNN's attention
Parameters:  11,267,900 with the published vocabulary of 30,522; 5,529,090 with the 8,192 trained here
Result:      published, GLUE average of the uncased model of this size: 65.8 (google-research/bert, README)

Nearly half of the steps use rows of 16 tokens. With rows of 128 from the start, the model would learn only word
frequencies.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, PhaseConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.bert import Bert
from jaxlm.objectives.masked_lm import MaskedLM

experiment = Experiment(
    objective=MaskedLM(model=Bert.published("mini")),
    data=TextData(source="python-docs", length=128, vocab_size=8192),
    optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=150),
    train=TrainConfig(
        steps=1500, phases=(PhaseConfig(700, length=16), PhaseConfig(800)), batch_size=32, log_every=10,
        eval_every=250, eval_batches=16,
        checkpoint_every=250,
    ),
)
