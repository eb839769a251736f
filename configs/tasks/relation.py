"""The relation between two marked spans of a sentence (FewRel, TACRED), on your own data.

Command:     jaxlm finetune configs/tasks/relation.py --init-from RUN_OR_HF_DIR --data.source train.json \
                 --data.dev dev.json --run-dir runs/relation
Data:        a JSON array, or JSON lines: text, ents [[id, start, end], [id, start, end]] of head and tail, label, and
             perhaps ann [[id, start, end, score], …]. An ERNIE run reads the entities of its own folder of vectors
             (--objective.entities names another); other models ignore them.
Recipe:      FewRel's (thunlp/ERNIE), whose rate stays constant after the warm-up. TACRED: --train.epochs 4
             --data.threshold 0.4 --optimizer.warmup-share 0 --optimizer.bias-correction True
Result:      published ERNIE, FewRel: macro precision, recall, F1 88.49, 88.44, 88.32 (BERT-base 85.05, 85.11, 84.89);
             TACRED: micro 69.97, 66.08, 67.97 (BERT-base 67.23, 64.81, 66.00)
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.knowledge.relation import RelationClassification, RelationRows

experiment = Experiment(
    objective=RelationClassification(),
    data=RelationRows(length=256, threshold=0.4),
    optimizer=OptimizerConfig(
        learning_rate=2e-5, warmup_steps=None, warmup_share=0.1, schedule="constant", bias_correction=False
    ),
    train=TrainConfig(steps=None, epochs=10, batch_size=32, eval_every=500, checkpoint_every=500, eval_batches=1000),
)
