"""Small T5 1.1 for a CPU (2 + 2 layers, width 128), trained on Python's own documentation.

Command:     jaxlm pretrain configs/t5_tiny.py --run-dir runs/t5_tiny
Hardware:    two CPU cores
Parameters:  3,081,856 with the vocabulary of 8,192 trained here
Result:      held-out span_loss 9.552 to 5.428, English Wikipedia (configs/RESULTS.md)
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.t5 import T5
from jaxlm.objectives.span_corruption import SpanCorruption

experiment = Experiment(
    objective=SpanCorruption(
        model=T5(
            vocab_size=8192, hidden_size=128, num_layers=2, num_heads=2, head_dim=64, intermediate_size=384,
            activation="gated-gelu", tied_head=False, scaled_head=False, dropout=0.0, attention_dropout=0.0,
        )
    ),
    data=TextData(source="python-docs", length=128, vocab_size=8192),
    optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=100),
    train=TrainConfig(steps=500, batch_size=32, log_every=10, eval_every=100, eval_batches=8, checkpoint_every=250),
)
