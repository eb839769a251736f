"""Text vectors for a CPU: a trained encoder goes on with pairs of texts that belong together (InfoNCE).

The encoder is that of --init-from, of any family and size: a run, such as one of bert_tiny, or a published model. The
model here is only what `jaxlm plan` compiles.

Command:     jaxlm pretrain configs/contrastive_tiny.py --init-from RUN_OR_HF_DIR --data.source pairs.jsonl \
                 --run-dir runs/contrastive_tiny
Data:        {"query": "…", "positive": "…"} a line, or a .csv or .tsv with these columns; with hard negatives
             (a list "negatives") --objective.negatives 1, with scores --data.score-field score --objective.criterion
             cosent
Hardware:    two CPU cores
Parameters:  4,369,408 with the published vocabulary of 30,522
Result:      held-out accuracy among 64 passages 0.526 at step 200 of 200, titles and last paragraphs of 12,000 articles
             of English Wikipedia, from a bert_tiny of 400 steps (--data.length 64 --objective.query-length 16)
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.models.bert import Bert
from jaxlm.tasks.contrastive import Contrastive
from jaxlm.tasks.text_groups import TextGroups

experiment = Experiment(
    objective=Contrastive(model=Bert.published("tiny", dropout=0.0, attention_dropout=0.0)),
    data=TextGroups(length=128),
    optimizer=OptimizerConfig(learning_rate=5e-4, warmup_steps=20),
    train=TrainConfig(steps=300, batch_size=64, log_every=10, eval_every=50, eval_batches=12, checkpoint_every=100),
)
