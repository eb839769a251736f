"""Small ELECTRA for a CPU: a discriminator of 3 layers and width 128, and a generator half as wide.

Command:     jaxlm pretrain configs/electra_tiny.py --run-dir runs/electra_tiny
Hardware:    two CPU cores
Parameters:  1,901,057 with the vocabulary of 8,192 trained here
Result:      held-out generator_loss 9.293 to 6.121, discriminator_loss 0.391, English Wikipedia (configs/RESULTS.md)

So small a model learns faster without dropout and with initial weights of standard deviation 1/sqrt(width) than with
BERT's values. On rows of 16 tokens it learns to attend to neighbours many times faster than on rows of 128.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, PhaseConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.electra import Electra
from jaxlm.objectives.replaced_tokens import ReplacedTokens

experiment = Experiment(
    objective=ReplacedTokens(
        model=Electra(
            vocab_size=8192, embedding_size=128, hidden_size=128, num_layers=3, num_heads=4, intermediate_size=512,
            generator_hidden_size=64, generator_num_layers=3, generator_num_heads=4, generator_intermediate_size=256,
            dropout=0.0, attention_dropout=0.0, init_std=0.08,
        )
    ),
    data=TextData(source="python-docs", length=128, vocab_size=8192),
    optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=60),
    train=TrainConfig(
        steps=450, phases=(PhaseConfig(350, length=16), PhaseConfig(100)), batch_size=32, log_every=10,
        eval_every=100, eval_batches=8,
        checkpoint_every=150,
    ),
)
