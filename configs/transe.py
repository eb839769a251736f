"""TransE of the size that ERNIE reads: 5,040,986 entities and 927 relations of Wikidata, width 100.

The source is a file of triples: head, relation and tail, with tabs between. ERNIE's vectors were trained on 24,267,796
of them, and the settings are not published; these are KagNet's for ConceptNet, by OpenKE: L1 distance, margin 1, one
corrupted triple each, 1,000 epochs of 512 batches. They used plain gradient descent; here Adagrad replaces it.

Command:     jaxlm pretrain configs/transe.py --run-dir runs/transe --data.source wikidata.tsv.zst
             jaxlm export runs/transe vectors
Hardware:    published: some hours on 8 CPUs (thunlp/ERNIE); here see `jaxlm plan configs/transe.py`: the width is split
             over 4 devices, so that a chip of 16 GB holds the step; on one device --mesh.fsdp 1
Parameters:  504,191,300
Result:      none is published of these vectors by themselves
"""

from jaxlm.config.experiment import Experiment, OptimizerConfig, TrainConfig
from jaxlm.knowledge.transe import TransE
from jaxlm.knowledge.triple_ranking import TripleRanking
from jaxlm.knowledge.triples import TripleData
from jaxlm.parallel.mesh import MeshConfig

experiment = Experiment(
    objective=TripleRanking(model=TransE()),
    data=TripleData(held_out=0.0005),
    optimizer=OptimizerConfig(
        name="adagrad", learning_rate=0.1, warmup_steps=0, schedule="constant", weight_decay=0.0, clip_norm=0.0
    ),
    train=TrainConfig(
        steps=512_000, batch_size=47_360, log_every=100, eval_every=51_200, eval_batches=1, checkpoint_every=5_120
    ),
    mesh=MeshConfig(fsdp=4),
)
