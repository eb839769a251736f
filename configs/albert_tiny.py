"""Small ALBERT for a CPU (2 layers with shared parameters, width 128), trained on Python's own documentation.

As in bert_tiny, there is no dropout, the initial weights are larger, and training starts with rows of 16 tokens.
Sentence order is learnt late: with so little text its accuracy stays near chance.

Command:     jaxlm pretrain configs/albert_tiny.py --run-dir runs/albert_tiny
             jaxlm fill-mask runs/albert_tiny "Return a [MASK] of all the names."
Hardware:    two CPU cores
Parameters:  506,434 with the vocabulary of 4,096 trained here
Result:      held-out mlm_loss 9.133 to 6.614, English Wikipedia (configs/RESULTS.md)
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, PhaseConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.albert import Albert
from jaxlm.objectives.masked_lm import MaskedLM

experiment = Experiment(
    objective=MaskedLM(
        model=Albert(
            vocab_size=4096, embedding_size=64, hidden_size=128, num_layers=2, num_heads=2, intermediate_size=512,
            max_positions=128, dropout=0.0, attention_dropout=0.0, init_std=0.08,
        ),
        input_format="sentence-order", whole_word=True, longest_ngram=3,
    ),
    data=TextData(source="python-docs", length=128, vocab_size=4096, held_out=0.05),
    optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=60),
    train=TrainConfig(
        steps=600, phases=(PhaseConfig(300, length=16), PhaseConfig(300)), batch_size=32, log_every=10,
        eval_every=100, eval_batches=12,
        checkpoint_every=100,
    ),
)
