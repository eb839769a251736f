"""Types of a mention in a sentence, any number of them (FIGER, Open Entity), on your own data.

Command:     jaxlm finetune configs/tasks/entity_typing.py --init-from RUN_OR_HF_DIR --data.source train.json \
                 --data.dev dev.json --run-dir runs/typing
Data:        a JSON array, or JSON lines: sent, start, end, labels, ents [[id, start, end, score], …]. An ERNIE run
             reads the entities of its own folder of vectors (--objective.entities names another); other models ignore
             them.
Recipe:      Open Entity's (thunlp/ERNIE), whose rate stays constant after the warm-up. FIGER: --data.length 256
             --train.batch-size 2048 --train.accumulate 32 --train.epochs 3 --optimizer.warmup-share 0.2
             --objective.top-label True
Result:      published ERNIE, Open Entity 2,000 rows: micro precision, recall, F1 78.42, 72.90, 75.56 (BERT-base 76.37,
             70.96, 73.56); FIGER: accuracy 57.19 (BERT-base 52.04)
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.knowledge.entity_typing import EntityTyping, TypingRows

experiment = Experiment(
    objective=EntityTyping(),
    data=TypingRows(length=128, threshold=0.3),
    optimizer=OptimizerConfig(
        learning_rate=2e-5, warmup_steps=None, warmup_share=0.1, schedule="constant", bias_correction=False
    ),
    train=TrainConfig(steps=None, epochs=10, batch_size=16, eval_every=500, checkpoint_every=500, eval_batches=1000),
)
