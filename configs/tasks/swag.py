"""SWAG: which of four endings follows?

Command:     jaxlm finetune configs/tasks/swag.py --init-from RUN_OR_HF_DIR --data.source train.csv \
                 --data.dev val.csv --run-dir runs/swag
Data:        its own CSV
Recipe:      batch 16, learning rate 2e-5, 3 epochs (Devlin et al. 2018, section 4.4)
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.tasks.multiple_choice import ChoiceRows, MultipleChoice

experiment = Experiment(
    objective=MultipleChoice(),
    data=ChoiceRows(
        text_field="sent1", question_field="sent2", choices_fields="ending0,ending1,ending2,ending3",
    ),
    optimizer=OptimizerConfig(learning_rate=2e-5, warmup_steps=None, warmup_share=0.1),
    train=TrainConfig(steps=None, epochs=3, batch_size=16, eval_every=1000, checkpoint_every=1000, eval_batches=1000),
)
