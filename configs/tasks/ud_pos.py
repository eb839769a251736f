"""Part-of-speech tagging of Universal Dependencies.

Command:     jaxlm finetune configs/tasks/ud_pos.py --init-from RUN_OR_HF_DIR --data.source en_ewt-ud-train.conllu \
                 --data.dev en_ewt-ud-dev.conllu --run-dir runs/ud_pos
Data:        CoNLL-U; the tag is UPOS
Recipe:      the first piece of a word predicts its tag
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.tasks.tagging import Tagging, TagRows

experiment = Experiment(
    objective=Tagging(),
    data=TagRows(word_column=2, tag_column=4, has_ids=True),
    optimizer=OptimizerConfig(learning_rate=5e-5, warmup_steps=None, warmup_share=0.1),
    train=TrainConfig(steps=None, epochs=3, batch_size=32, eval_every=200, checkpoint_every=200, eval_batches=1000),
)
