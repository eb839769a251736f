"""CoQA: answers in a conversation about a passage, also yes, no and unknown.

Command:     jaxlm finetune configs/tasks/coqa.py --init-from RUN_OR_HF_DIR --data.source coqa-train-v1.0.json \
                 --data.dev coqa-dev-v1.0.json --run-dir runs/coqa
Data:        its own JSON; each question follows the two turns before it
Recipe:      as for SQuAD
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.tasks.answers import AnswerRows, Answers

experiment = Experiment(
    objective=Answers(no_answer=True, kinds=True, max_question=128),
    data=AnswerRows(form="coqa", history=2, length=512),
    optimizer=OptimizerConfig(learning_rate=3e-5, warmup_steps=None, warmup_share=0.1),
    train=TrainConfig(steps=None, epochs=2, batch_size=12, eval_every=1000, checkpoint_every=1000, eval_batches=1000),
)
