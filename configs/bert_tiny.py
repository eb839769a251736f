"""BERT-tiny (2 layers, width 128): the published shape, trained on the text that every Python carries.

So little text is learnt faster without dropout, from weights of the spread 1/sqrt(width) instead of BERT's 0.02, and
with 4,096 tokens; a twentieth of the documents is held out, since a hundredth would be nine. Half of the steps read
rows of 16 tokens, over which attention is learnt at once.

Command:     jaxlm pretrain configs/bert_tiny.py --run-dir runs/bert_tiny
Hardware:    two CPU cores
Parameters:  4,433,468 with the published vocabulary of 30,522; 1,024,514 with the 4,096 trained here
Result:      held-out mlm_loss 9.248 to 6.477, English Wikipedia (configs/README.md)
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
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
        steps=600, short_steps=300, batch_size=32, log_every=10, eval_every=100, eval_batches=12, checkpoint_every=100
    ),
)
