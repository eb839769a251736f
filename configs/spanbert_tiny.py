"""Small SpanBERT for a CPU (2 layers, width 128), trained on Python's own documentation.

As in bert_tiny, there is no dropout, the initial weights are larger, and training starts with rows of 16 tokens.

Command:     jaxlm pretrain configs/spanbert_tiny.py --run-dir runs/spanbert_tiny
             jaxlm fill-mask runs/spanbert_tiny "Return a [MASK] of all the names."
Hardware:    two CPU cores
Parameters:  1,066,336 with the vocabulary of 4,096 trained here
Result:      held-out mlm_loss 9.396 to 6.570, English Wikipedia (configs/RESULTS.md)
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, PhaseConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.bert import Bert
from jaxlm.objectives.span_boundary import SpanBoundary

experiment = Experiment(
    objective=SpanBoundary(
        model=Bert.published("tiny", vocab_size=4096, dropout=0.0, attention_dropout=0.0, init_std=0.08),
        offset_size=32,
    ),
    data=TextData(source="python-docs", length=128, vocab_size=4096, held_out=0.05),
    optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=60),
    train=TrainConfig(
        steps=600, phases=(PhaseConfig(300, length=16), PhaseConfig(300)), batch_size=32, log_every=10,
        eval_every=100, eval_batches=12,
        checkpoint_every=100,
    ),
)
