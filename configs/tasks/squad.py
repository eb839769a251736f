"""SQuAD 1.1: where in a passage is the answer? Also for your own data in this format.

Command:     jaxlm finetune configs/tasks/squad.py --init-from RUN_OR_HF_DIR --data.source train-v1.1.json \
                 --data.dev dev-v1.1.json --run-dir runs/squad
Data:        SQuAD's JSON format
Recipe:      BERT's for SQuAD: windows of 384 tokens every 128, questions of 64, batch 12, learning rate 3e-5, 2 epochs;
             published: bert-base 81.25 exact match, 88.41 F1 (google-research/bert, README)
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.tasks.answers import AnswerRows, Answers

experiment = Experiment(
    objective=Answers(),
    data=AnswerRows(),
    optimizer=OptimizerConfig(learning_rate=3e-5, warmup_steps=None, warmup_share=0.1),
    train=TrainConfig(steps=None, epochs=2, batch_size=12, eval_every=1000, checkpoint_every=1000, eval_batches=1000),
)
