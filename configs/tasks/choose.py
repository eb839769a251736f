"""Multiple choice, on your own data.

Command:     jaxlm finetune configs/tasks/choose.py --init-from RUN_OR_HF_DIR --data.source train.jsonl \
                 --data.dev dev.jsonl --run-dir runs/choose
Data:        TSV or CSV with a header line, JSON lines, tfds:NAME; columns by --data.text-field,
             --data.choices-fields (several with commas between, or a list in JSON), --data.label-field
             (number of the choice, from 0)
Recipe:      BERT's for SWAG: batch 16, learning rate 2e-5, 3 epochs (Devlin et al. 2018, section 4.4)
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.tasks.multiple_choice import ChoiceRows, MultipleChoice

experiment = Experiment(
    objective=MultipleChoice(),
    data=ChoiceRows(text_field="text", choices_fields="choices", label_field="label"),
    optimizer=OptimizerConfig(learning_rate=2e-5, warmup_steps=None, warmup_share=0.1),
    train=TrainConfig(steps=None, epochs=3, batch_size=16, eval_every=500, checkpoint_every=500, eval_batches=1000),
)
