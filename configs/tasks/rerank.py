"""Reranking: how well does a passage answer a query? A cross-encoder for the first results of a search.

Command:     jaxlm finetune configs/tasks/rerank.py --init-from RUN_OR_HF_DIR --data.source train.jsonl \
                 --data.dev dev.jsonl --run-dir runs/rerank
Data:        {"query": "…", "positive": "…", "negatives": ["…", …]} a line, or a table; columns by
             --data.query-field, --data.positive-field, --data.negative-fields (for pairs with a class, pair.py)
Recipe:      batch 16, learning rate 2e-5, 1 epoch, a tenth of it warm-up
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.tasks.rerank import Rerank
from jaxlm.tasks.text_groups import TextGroups

experiment = Experiment(
    objective=Rerank(),
    data=TextGroups(length=256),
    optimizer=OptimizerConfig(learning_rate=2e-5, warmup_steps=None, warmup_share=0.1),
    train=TrainConfig(steps=None, epochs=1, batch_size=16, eval_every=500, checkpoint_every=500, eval_batches=1000),
)
