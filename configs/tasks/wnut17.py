"""WNUT-17: named entities in social media (scored by the F1 of whole entities).

Command:     jaxlm finetune configs/tasks/wnut17.py --init-from RUN_OR_HF_DIR --data.source wnut17train.conll \
                 --data.dev emerging.dev.conll --run-dir runs/wnut17
Data:        its own CoNLL, IOB2
Recipe:      the first piece of a word predicts its tag
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.tasks.tagging import Tagging, TagRows

experiment = Experiment(
    objective=Tagging(metric="entities"),
    data=TagRows(),
    optimizer=OptimizerConfig(learning_rate=5e-5, warmup_steps=None, warmup_share=0.1),
    train=TrainConfig(steps=None, epochs=3, batch_size=32, eval_every=100, checkpoint_every=100, eval_batches=1000),
)
