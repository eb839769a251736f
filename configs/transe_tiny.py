"""Small TransE for a CPU: 30 passes over a graph of the size of ConceptNet-100K, width 100.

Command:     jaxlm pretrain configs/transe_tiny.py --run-dir runs/transe_tiny --data.source triples.tsv
             jaxlm export runs/transe_tiny vectors
Hardware:    two CPU cores
Parameters:  7,820,500 with the 78,171 entities and 34 relations of ConceptNet-100K
Result:      filtered MRR 0.057 and hits@10 0.141 on ConceptNet-100K's validation triples (launch/tables/STUDIES.md)
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.knowledge.transe import TransE
from jaxlm.knowledge.triple_ranking import TripleRanking
from jaxlm.knowledge.triples import TripleData

experiment = Experiment(
    objective=TripleRanking(
        model=TransE(num_entities=78_171, num_relations=34, normalize="all"), margin=4.0, negatives=10
    ),
    data=TripleData(),
    optimizer=OptimizerConfig(
        learning_rate=1e-2, warmup_steps=0, schedule="constant", weight_decay=0.0, clip_norm=0.0
    ),
    train=TrainConfig(
        steps=600, batch_size=5000, log_every=20, eval_every=300, eval_batches=1, checkpoint_every=300
    ),
)
