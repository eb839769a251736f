"""Small DistilBERT for a CPU (2 layers, width 256), with a teacher trained by bert_mini.py.

Command:     jaxlm pretrain configs/bert_mini.py --run-dir runs/bert_mini
             jaxlm pretrain configs/distilbert_tiny.py --run-dir runs/distilbert_tiny --objective.teacher runs/bert_mini
             jaxlm fill-mask runs/distilbert_tiny "Return a [MASK] of all the names."
Hardware:    two CPU cores
Parameters:  3,882,752 with the vocabulary of 8,192 trained here
Result:      held-out soft_loss 0.151 at step 50, 0.114 at the end, English Wikipedia (configs/RESULTS.md)
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.distilbert import Distilbert
from jaxlm.objectives.distillation import Distillation

experiment = Experiment(
    objective=Distillation(
        model=Distilbert(
            vocab_size=8192, hidden_size=256, num_layers=2, num_heads=4, intermediate_size=1024, dropout=0.0,
            attention_dropout=0.0,
        )
    ),
    data=TextData(source="python-docs", length=128, vocab_size=8192),
    optimizer=OptimizerConfig(learning_rate=5e-4, warmup_steps=15, b2=0.98, weight_decay=0.0, clip_norm=5.0),
    train=TrainConfig(steps=200, batch_size=16, log_every=10, eval_every=50, eval_batches=8, checkpoint_every=50),
)
