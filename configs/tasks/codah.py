"""CODAH: which of four endings fits?

Command:     jaxlm finetune configs/tasks/codah.py --init-from RUN_OR_HF_DIR --data.source fold_0/train.tsv \
                 --data.dev fold_0/dev.tsv --run-dir runs/codah
Data:        its own TSV without a header line
Recipe:      as for SWAG
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.tasks.multiple_choice import ChoiceRows, MultipleChoice

experiment = Experiment(
    objective=MultipleChoice(),
    data=ChoiceRows(text_field="2", choices_fields="3,4,5,6", label_field="7"),
    optimizer=OptimizerConfig(learning_rate=2e-5, warmup_steps=None, warmup_share=0.1),
    train=TrainConfig(steps=None, epochs=3, batch_size=16, eval_every=100, checkpoint_every=100, eval_batches=1000),
)
