"""Tagging of words, on your own data.

Command:     jaxlm finetune configs/tasks/tag.py --init-from RUN_OR_HF_DIR --data.source train.conll \
                 --data.dev dev.conll --run-dir runs/tag
Data:        CoNLL: one word per line, by default in the first column, its tag in the last one
             (--data.word-column, --data.tag-column); tags that mark entities are also scored as entities
Recipe:      BERT's for named entities: the first piece of a word predicts its tag (section 5.3)
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.tasks.tagging import Tagging, TagRows

experiment = Experiment(
    objective=Tagging(),
    data=TagRows(),
    optimizer=OptimizerConfig(learning_rate=5e-5, warmup_steps=None, warmup_share=0.1),
    train=TrainConfig(steps=None, epochs=3, batch_size=32, eval_every=500, checkpoint_every=500, eval_batches=1000),
)
