"""Text classification, on your own data; several labels per row with --objective.target labels.

Command:     jaxlm finetune configs/tasks/classify.py --init-from RUN_OR_HF_DIR --data.source train.tsv \
                 --data.dev dev.tsv --run-dir runs/classify
Data:        TSV or CSV with a header line, JSON lines, tfds:NAME; columns by --data.text-field, --data.label-field
Recipe:      BERT's grid for GLUE (Devlin et al. 2018, appendix A.3):
             batch 16 or 32, learning rate 2e-5 to 5e-5, 2 to 4 epochs
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.tasks.classification import Classification, TextRows

experiment = Experiment(
    objective=Classification(),
    data=TextRows(text_field="text", label_field="label"),
    optimizer=OptimizerConfig(learning_rate=3e-5, warmup_steps=None, warmup_share=0.1),
    train=TrainConfig(steps=None, epochs=3, batch_size=32, eval_every=500, checkpoint_every=500, eval_batches=1000),
)
