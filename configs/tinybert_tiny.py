"""Small TinyBERT for a CPU (2 layers, width 128), with a teacher trained by bert_mini.py.

Command:     jaxlm pretrain configs/bert_mini.py --run-dir runs/bert_mini
             jaxlm pretrain configs/tinybert_tiny.py --run-dir runs/tinybert_tiny --objective.teacher runs/bert_mini
Hardware:    two CPU cores
Parameters:  1,544,192 with the vocabulary of 8,192 trained here
Result:      held-out hidden_loss 2.461 at step 50, 1.581 at the end, English Wikipedia (configs/RESULTS.md)
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.text import TextData
from jaxlm.models.bert import Bert
from jaxlm.objectives.layer_distillation import LayerDistillation

experiment = Experiment(
    objective=LayerDistillation(
        model=Bert(
            vocab_size=8192, hidden_size=128, num_layers=2, num_heads=4, intermediate_size=512, dropout=0.0,
            attention_dropout=0.0, init_std=0.08,
        ),
        teacher_hidden_size=256,
    ),
    data=TextData(source="python-docs", length=128, vocab_size=8192),
    optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=20),
    train=TrainConfig(steps=200, batch_size=16, log_every=10, eval_every=50, eval_batches=8, checkpoint_every=50),
)
