"""Small DeBERTa v3 for a CPU: a discriminator of 4 layers and width 128, and a generator of 2.

Command:     jaxlm pretrain configs/deberta_v3_tiny.py --run-dir runs/deberta_v3_tiny
Hardware:    two CPU cores
Parameters:  3,378,817 with the vocabulary of 8,192 trained here
Result:      held-out generator_loss 5.719, discriminator_loss 0.371 after 490 steps (245x16,245), English
             Wikipedia (configs/RESULTS.md)

Dropout, initial weights and the short rows at the start are those of electra_tiny. With 64 buckets, distances from 33
tokens on share them.
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, PhaseConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.deberta import DebertaV3
from jaxlm.objectives.replaced_tokens import ReplacedTokens

experiment = Experiment(
    objective=ReplacedTokens(
        model=DebertaV3(
            vocab_size=8192, hidden_size=128, num_layers=4, num_heads=4, intermediate_size=512, generator_num_layers=2,
            max_positions=128, position_buckets=64, dropout=0.0, attention_dropout=0.0, init_std=0.08,
        ),
        mask_share=1.0, discriminator_weight=10.0, two_segments=False, short_rate=0.0,
    ),
    data=TextData(source="python-docs", length=128, vocab_size=8192),
    optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=60),
    train=TrainConfig(
        steps=450, phases=(PhaseConfig(350, length=16), PhaseConfig(100)), batch_size=32, log_every=10,
        eval_every=100, eval_batches=8,
        checkpoint_every=150,
    ),
)
