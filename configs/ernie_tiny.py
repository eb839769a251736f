"""Small ERNIE for a CPU (a layer of tokens, 2 of tokens and entities, width 128).

Command:     jaxlm pretrain configs/ernie_tiny.py --run-dir runs/ernie_tiny --data.source text.jsonl \\
                 --objective.entities VECTORS_FOLDER
             (text.jsonl has mentions; for text without any, --data.entity-names names.tsv finds them)
Hardware:    two CPU cores
Parameters:  1,482,910 with the vocabulary of 4,096 trained here
Result:      held-out dea_loss 2.702 at step 100, 1.299 at the end; mlm_loss 6.567 and 6.113; nsp_loss 0.702 and 0.667,
             a small text with linked entities (launch/tables/STUDIES.md)
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, PhaseConfig, TrainConfig
from jaxlm.knowledge.entity_autoencoder import EntityAutoencoder
from jaxlm.knowledge.ernie import Ernie
from jaxlm.knowledge.linked_text import LinkedText

experiment = Experiment(
    objective=EntityAutoencoder(
        model=Ernie(
            vocab_size=4096, hidden_size=128, num_layers=3, num_text_layers=1, num_heads=2, intermediate_size=512,
            dropout=0.0, attention_dropout=0.0, init_std=0.08,
        )
    ),
    data=LinkedText(length=128, vocab_size=4096, held_out=0.05),
    optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=60),
    train=TrainConfig(
        steps=600, phases=(PhaseConfig(200, length=16), PhaseConfig(400)), batch_size=32, log_every=10,
        eval_every=100, eval_batches=12,
        checkpoint_every=100,
    ),
)
