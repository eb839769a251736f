"""Registration of the systems and tasks of this room, by the call that other packages make."""

from jaxlm.knowledge.entity_autoencoder import EntityAutoencoder
from jaxlm.knowledge.entity_typing import EntityTyping, TypingRows
from jaxlm.knowledge.ernie import Ernie
from jaxlm.knowledge.kagnet import KagNet
from jaxlm.knowledge.kagnet_network import KagNetwork
from jaxlm.knowledge.linked_text import LinkedText
from jaxlm.knowledge.relation import RelationClassification, RelationRows
from jaxlm.knowledge.schema_graph import GraphSizes
from jaxlm.knowledge.transe import TransE
from jaxlm.knowledge.triple_ranking import TripleRanking
from jaxlm.knowledge.triples import TripleData
from jaxlm.systems import System, TaskSystem, register
from jaxlm.tasks.multiple_choice import ChoiceRows

register(
    System(TripleRanking, TransE, writer="jaxlm.knowledge.transe_files"),
    System(EntityAutoencoder, Ernie, writer="jaxlm.knowledge.ernie_files"),
    TaskSystem(KagNet, ChoiceRows),
    TaskSystem(EntityTyping, TypingRows),
    TaskSystem(RelationClassification, RelationRows),
    KagNetwork, GraphSizes, LinkedText, TripleData,
)
