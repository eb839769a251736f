"""Small TransE for a CPU.

Command:     jaxlm pretrain configs/transe_tiny.py --run-dir runs/transe_tiny --data.source triples.tsv
Parameters:  7,820,500 of the 78,171 entities and 34 relations of ConceptNet-100K
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.data.triples import TripleData
from jaxlm.models.transe import TransE
from jaxlm.objectives.triple_ranking import TripleRanking

experiment = Experiment(
    objective=TripleRanking(model=TransE(num_entities=78_171, num_relations=34)),
    data=TripleData(),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=0, weight_decay=0.0, clip_norm=0.0),
    train=TrainConfig(steps=3000, batch_size=1000, log_every=100, eval_every=1500, checkpoint_every=1500),
)
