"""BERT-tiny (2 layers, width 128): the published shape, trained on the text that every Python carries.

Command:     jaxlm pretrain configs/bert_tiny.py --run-dir runs/bert_tiny
Hardware:    two CPU cores
Parameters:  4,433,468 with the published vocabulary of 30,522; 1,552,898 with the 8,192 trained here
"""

from jaxlm.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.models.bert import BertConfig
from jaxlm.objectives.bert import BertPretraining
from jaxlm.text.data import DataConfig

experiment = Experiment(
    objective=BertPretraining(model=BertConfig.published("tiny")),
    data=DataConfig(source="python-docs", length=128, vocab_size=8192),
    optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=60),
    train=TrainConfig(steps=400, batch_size=32, log_every=10, eval_every=100, eval_batches=8, checkpoint_every=100),
)
