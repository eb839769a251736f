"""Small UL2 for a CPU: the model of t5_tiny, with a mixture of denoisers.

Command:     jaxlm pretrain configs/ul2_tiny.py --run-dir runs/ul2_tiny
             jaxlm generate runs/ul2_tiny "[S2S] Return the"
Hardware:    two CPU cores
Parameters:  3,081,856 with the vocabulary of 8,192 trained here
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.t5 import T5
from jaxlm.objectives.mixture_of_denoisers import MixtureOfDenoisers

experiment = Experiment(
    objective=MixtureOfDenoisers(
        model=T5(
            vocab_size=8192, hidden_size=128, num_layers=2, num_heads=2, head_dim=64, intermediate_size=384,
            activation="gated-gelu", tied_head=False, scaled_head=False, dropout=0.0, attention_dropout=0.0,
        )
    ),
    data=TextData(source="python-docs", length=128, vocab_size=8192),
    optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=100),
    train=TrainConfig(steps=500, batch_size=32, log_every=10, eval_every=100, eval_batches=8, checkpoint_every=250),
)
