"""Small XLM-R for a CPU (2 layers, width 128), by default trained on Python's own documentation.

The model is that of roberta_tiny, with a unigram vocabulary for text of any language.

Command:     jaxlm pretrain configs/xlm_roberta_tiny.py --run-dir runs/xlm_roberta_tiny
             jaxlm fill-mask runs/xlm_roberta_tiny "Return a [MASK] of all the names."
Hardware:    two CPU cores
Parameters:  1,486,976 with the vocabulary of 8,192 trained here
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, PhaseConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.xlm_roberta import XlmRoberta
from jaxlm.objectives.masked_lm import MaskedLM

experiment = Experiment(
    objective=MaskedLM(
        model=XlmRoberta(
            vocab_size=8192, hidden_size=128, num_layers=2, num_heads=2, intermediate_size=512, max_positions=128,
            dropout=0.0, attention_dropout=0.0, init_std=0.08,
        ),
        input_format="full-sentences", short_rate=0.0,
    ),
    data=TextData(source="python-docs", length=128, tokenizer_kind="unigram", vocab_size=8192, held_out=0.05),
    optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=60),
    train=TrainConfig(
        steps=900, phases=(PhaseConfig(450, length=16), PhaseConfig(450)), batch_size=32, log_every=10,
        eval_every=100, eval_batches=12,
        checkpoint_every=100,
    ),
)
