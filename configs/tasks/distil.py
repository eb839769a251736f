"""Classification by distillation from a fine-tuned teacher, as for TinyBERT and DistilBERT.

Command:     jaxlm finetune configs/tasks/distil.py --init-from STUDENT --objective.teacher FINE_TUNED \
                 --data.source train.tsv --data.dev dev.tsv --run-dir runs/distilled
Data:        as for classify.py; the teacher's own columns
Recipe:      TinyBERT: first the layers, with --objective.layer-weight 1 --objective.soft-weight 0 --optimizer.schedule
             constant --optimizer.warmup-share 0 (batch 32, learning rate 5e-5, 10 epochs); then from that run the
             predictions, as here (learning rate 3e-5, 3 epochs). The published results are of augmented rows
             (data_augmentation.py of the released code), which are not made here.
             DistilBERT: --objective.temperature 2 --objective.hard-weight 1
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.tasks.classification import TextRows
from jaxlm.tasks.distillation import DistilledClassification

experiment = Experiment(
    objective=DistilledClassification(),
    data=TextRows(text_field="text", label_field="label"),
    optimizer=OptimizerConfig(learning_rate=3e-5, warmup_steps=None, warmup_share=0.1),
    train=TrainConfig(steps=None, epochs=3, batch_size=32, eval_every=500, checkpoint_every=500, eval_batches=1000),
)
