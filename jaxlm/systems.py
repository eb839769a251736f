"""Registry of the systems that jaxlm pretrains. A new system is its own files and an entry here."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxlm.data.schema_graph import GraphSizes
from jaxlm.models.albert import Albert
from jaxlm.models.base import Model
from jaxlm.models.bert import Bert
from jaxlm.models.deberta import Deberta, DebertaV3
from jaxlm.models.distilbert import Distilbert
from jaxlm.models.electra import Electra, ElectraEncoder
from jaxlm.models.elmo import Elmo
from jaxlm.models.ernie import Ernie
from jaxlm.models.gpt1 import Gpt1
from jaxlm.models.gpt2 import Gpt2
from jaxlm.models.gpt3 import Gpt3
from jaxlm.models.kagnet import KagNetwork
from jaxlm.models.modernbert import ModernBert, ModernBertDecoder
from jaxlm.models.reformer import Reformer
from jaxlm.models.roberta import Roberta
from jaxlm.models.t5 import T5
from jaxlm.models.transe import TransE
from jaxlm.models.word2vec import Word2Vec
from jaxlm.models.xlm_roberta import XlmRoberta
from jaxlm.models.xlnet import Xlnet
from jaxlm.objectives.base import class_of
from jaxlm.objectives.bidirectional_lm import BidirectionalLM
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.objectives.distillation import Distillation
from jaxlm.objectives.entity_autoencoder import EntityAutoencoder
from jaxlm.objectives.layer_distillation import LayerDistillation
from jaxlm.objectives.masked_diffusion import MaskedDiffusion
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.mixture_of_denoisers import MixtureOfDenoisers
from jaxlm.objectives.permutation_lm import PermutationLM
from jaxlm.objectives.replaced_tokens import ReplacedTokens
from jaxlm.objectives.self_contrastive import SelfContrastive
from jaxlm.objectives.skip_gram import SkipGram
from jaxlm.objectives.span_boundary import SpanBoundary
from jaxlm.objectives.span_corruption import SpanCorruption
from jaxlm.objectives.triple_ranking import TripleRanking
from jaxlm.tasks.answers import AnswerRows, Answers
from jaxlm.tasks.classification import Classification, TextRows
from jaxlm.tasks.contrastive import Contrastive
from jaxlm.tasks.distillation import DistilledClassification
from jaxlm.tasks.entity_typing import EntityTyping, TypingRows
from jaxlm.tasks.kagnet import KagNet
from jaxlm.tasks.multiple_choice import ChoiceRows, MultipleChoice
from jaxlm.tasks.relation import RelationClassification, RelationRows
from jaxlm.tasks.rerank import Rerank
from jaxlm.tasks.tagging import Tagging, TagRows
from jaxlm.tasks.text_groups import TextGroups
from jaxlm.tasks.text_to_text import PairRows, TextToText


class System(NamedTuple):
    """Objective on a model."""

    objective: type
    model: type
    family: str = ""
    """Module of jaxlm.huggingface whose FAMILY exports and imports the model; "" without a Transformers class."""
    peer: str = ""
    """Recipe in jaxlm.analysis.recipes, for `jaxlm bench --peer`; "" for none."""
    writer: str = ""
    """Module of jaxlm.huggingface whose `write` exports a model without a Transformers class in another format. It may
    also `read` that format, from folders that have its file MARKER."""
    export_only: bool = False
    """Whether imports and fine-tuned models use the family of another system with this model or its `text_model`."""


SYSTEMS = (
    System(MaskedLM, Bert, "bert", "masked_lm"),
    System(MaskedLM, Roberta, "roberta", "masked_lm"),
    System(MaskedLM, XlmRoberta, "xlm_roberta", "masked_lm"),
    System(MaskedLM, Albert, "albert", "masked_lm"),
    System(MaskedLM, ModernBert, "modernbert", "masked_lm"),
    System(MaskedDiffusion, Bert, "bert", export_only=True),
    System(MaskedDiffusion, ModernBert, "modernbert", export_only=True),
    System(SpanBoundary, Bert, "spanbert", export_only=True),
    System(ReplacedTokens, Electra, "electra", "replaced_tokens"),
    System(MaskedLM, Deberta, "deberta", "masked_lm"),
    System(ReplacedTokens, DebertaV3, "deberta", export_only=True),
    System(CausalLM, Gpt2, "gpt2", "causal_lm"),
    System(CausalLM, Gpt1, "gpt1", "causal_lm"),
    System(CausalLM, Gpt3, "gpt2", "causal_lm"),
    System(CausalLM, ModernBertDecoder, "modernbert_decoder", "causal_lm"),
    System(CausalLM, Reformer, "reformer", "causal_lm"),
    System(MaskedLM, Distilbert, "distilbert"),
    System(Distillation, Distilbert, "distilbert", export_only=True),
    System(LayerDistillation, Bert, "tinybert", export_only=True),
    System(SpanCorruption, T5, "t5", "span_corruption"),
    System(MixtureOfDenoisers, T5, "t5", "span_corruption", export_only=True),
    System(PermutationLM, Xlnet, "xlnet", "permutation_lm"),
    System(SkipGram, Word2Vec, writer="word2vec"),
    System(TripleRanking, TransE, writer="transe"),
    System(BidirectionalLM, Elmo),
    System(EntityAutoencoder, Ernie, writer="ernie"),
)


def system_of(objective: Any, model: Any = None) -> System | None:
    """Return the system of an objective and a model, by default its own; None if it is not registered."""
    classes = (class_of(objective), type(objective.model if model is None else model))
    return next((system for system in SYSTEMS if (system.objective, system.model) == classes), None)


def importable() -> list[System]:
    """Return the systems whose families are imported and fine-tuned, at most one for each model."""
    return [system for system in SYSTEMS if system.family and not system.export_only]


TASKS: tuple[tuple[type, type], ...] = (
    (Classification, TextRows),
    (DistilledClassification, TextRows),
    (MultipleChoice, ChoiceRows),
    (KagNet, ChoiceRows),
    (Answers, AnswerRows),
    (Tagging, TagRows),
    (TextToText, PairRows),
    (EntityTyping, TypingRows),
    (RelationClassification, RelationRows),
    (Rerank, TextGroups),
)
"""Tasks, each with its default form of rows."""

CLASSES: tuple[type, ...] = tuple(dict.fromkeys([
    *(cls for system in SYSTEMS for cls in (system.objective, system.model)),
    *(cls for pair in TASKS for cls in pair), Contrastive, SelfContrastive,
    ElectraEncoder, Model, KagNetwork, GraphSizes,
]))
"""Classes that a configuration may name."""
