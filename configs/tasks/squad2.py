"""SQuAD 2.0: where in a passage is the answer, if there is one?

Command:     jaxlm finetune configs/tasks/squad2.py --init-from RUN_OR_HF_DIR --data.source train-v2.0.json \
                 --data.dev dev-v2.0.json --run-dir runs/squad2
Data:        SQuAD's JSON format. exact_match and f1 are at threshold 0, best_f1 at the best threshold for these rows
Recipe:      BERT's for SQuAD: windows of 384 tokens every 128, questions of 64, batch 12, learning rate 3e-5, 2 epochs
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.tasks.answers import AnswerRows, Answers

experiment = Experiment(
    objective=Answers(no_answer=True),
    data=AnswerRows(),
    optimizer=OptimizerConfig(learning_rate=3e-5, warmup_steps=None, warmup_share=0.1),
    train=TrainConfig(steps=None, epochs=2, batch_size=12, eval_every=1000, checkpoint_every=1000, eval_batches=1000),
)
