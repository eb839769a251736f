"""BERT-tiny (2 layers, width 128): the published size, trained on Python's own documentation.

On so little text the model learns faster without dropout, with initial weights of standard deviation 1/sqrt(width)
instead of BERT's 0.02, and with a vocabulary of 4,096. A twentieth of the documents is held out, because a hundredth
would be nine documents. Half of the steps use rows of 16 tokens, on which attention is learnt fastest.

Command:     jaxlm pretrain configs/bert_tiny.py --run-dir runs/bert_tiny
Hardware:    two CPU cores
Parameters:  4,433,468 with the published vocabulary of 30,522; 1,024,514 with the 4,096 trained here
Result:      held-out mlm_loss 9.248 to 6.477, English Wikipedia (configs/RESULTS.md)
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, PhaseConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.bert import Bert
from jaxlm.objectives.masked_lm import MaskedLM

experiment = Experiment(
    objective=MaskedLM(
        model=Bert.published("tiny", dropout=0.0, attention_dropout=0.0, init_std=0.08)
    ),
    data=TextData(source="python-docs", length=128, vocab_size=4096, held_out=0.05),
    optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=60),
    train=TrainConfig(
        steps=600, phases=(PhaseConfig(300, length=16), PhaseConfig(300)), batch_size=32, log_every=10,
        eval_every=100, eval_batches=12,
        checkpoint_every=100,
    ),
)
