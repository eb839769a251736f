"""Small ELMo for a CPU (2 × biLSTM of 256 cells, width 64), trained on Python's own documentation.

Command:     jaxlm pretrain configs/elmo_tiny.py --run-dir runs/elmo_tiny
Hardware:    two CPU cores
Parameters:  1,291,664 with the 8,192 words and symbols counted here
Result:      held-out lm_loss 9.016 to 4.861, English Wikipedia (configs/RESULTS.md)
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.elmo import Elmo
from jaxlm.objectives.bidirectional_lm import BidirectionalLM

experiment = Experiment(
    objective=BidirectionalLM(
        model=Elmo(
            vocab_size=8192, hidden_size=64, cell_size=256, num_highways=1, filter_widths=4, dropout=0.0,
        ),
        noise_words=1024,
    ),
    data=TextData(
        source="python-docs", length=20, tokenizer_kind="words", vocab_size=8192, held_out=0.05, sentences=True
    ),
    optimizer=OptimizerConfig(
        name="adagrad", learning_rate=0.1, warmup_steps=20, schedule="constant", eps=1e-4, clip_norm=0.5
    ),
    train=TrainConfig(steps=900, batch_size=64, log_every=10, eval_every=150, eval_batches=12, checkpoint_every=150),
)
