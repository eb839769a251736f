"""Registry of systems, tasks and configuration classes: jaxlm's, those of other packages, and those of presets.

All are added by `register`. A new system of jaxlm is its own files and an entry here. One of another package is the
same entry, in a module that the package names as an entry point (see jaxlm/YOUR_OWN.md).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
import types
from pathlib import Path
from typing import Any, NamedTuple

from jaxlm.data.text import TextData
from jaxlm.errors import UserError
from jaxlm.models.albert import Albert
from jaxlm.models.base import Model
from jaxlm.models.bert import Bert
from jaxlm.models.deberta import Deberta, DebertaV3
from jaxlm.models.distilbert import Distilbert
from jaxlm.models.electra import Electra, ElectraEncoder
from jaxlm.models.elmo import Elmo
from jaxlm.models.gpt1 import Gpt1
from jaxlm.models.gpt2 import Gpt2
from jaxlm.models.gpt3 import Gpt3
from jaxlm.models.llama import EuroBert, Gemma3, Llama, Mistral, Qwen3
from jaxlm.models.modernbert import ModernBert, ModernBertDecoder
from jaxlm.models.reformer import Reformer
from jaxlm.models.roberta import Roberta
from jaxlm.models.rotary_bert import Gte, NomicBert
from jaxlm.models.t5 import T5
from jaxlm.models.word2vec import Word2Vec
from jaxlm.models.xlm_roberta import XlmRoberta
from jaxlm.models.xlnet import Xlnet
from jaxlm.objectives.base import class_of
from jaxlm.objectives.bidirectional_lm import BidirectionalLM
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.objectives.distillation import Distillation
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
from jaxlm.parallel.hosts import log
from jaxlm.parallel.mesh import MeshConfig
from jaxlm.paths import cause
from jaxlm.tasks.answers import AnswerRows, Answers
from jaxlm.tasks.classification import Classification, TextRows
from jaxlm.tasks.contrastive import Contrastive
from jaxlm.tasks.distillation import DistilledClassification
from jaxlm.tasks.multiple_choice import ChoiceRows, MultipleChoice
from jaxlm.tasks.rerank import Rerank
from jaxlm.tasks.tagging import Tagging, TagRows
from jaxlm.tasks.text_groups import TextGroups
from jaxlm.tasks.text_to_text import PairRows, TextToText

ENTRY_POINTS = "jaxlm.systems"
"""Group of the entry points by which an installed package names the module that registers its classes."""
KNOWLEDGE = "jaxlm.knowledge.systems"
"""Module that registers as an installed package does, and which no other room imports by name."""


class System(NamedTuple):
    """Objective on a model."""

    objective: type
    model: type
    family: Any = ""
    """`jaxlm.huggingface.family.Family` that exports and imports the model, or the module whose FAMILY does, or has it
    by the class of the model: its dotted name, or its name in jaxlm.huggingface. "" without a Transformers class."""
    peer: Any = ""
    """`jaxlm.analysis.recipes.Recipe` for `jaxlm bench --peer`, or its name there; "" for none."""
    writer: str = ""
    """Name of a module, as for `family`, whose `write` exports a model without a Transformers class in another format.
    It may also `read` that format, from folders that have its file MARKER."""
    export_only: bool = False
    """Whether imports and fine-tuned models use the family of another system with this model or its `text_model`."""


class TaskSystem(NamedTuple):
    """Task with its default form of rows. A subclass without an entry of its own has that of its base."""

    task: type
    rows: type
    head: str = ""
    """Name in Transformers' auto classes ("SequenceClassification"), the key of `Family.heads`; "" for none. Models of
    several tasks with one name are imported as the first."""
    pipeline_tag: str = ""
    """Task on the hub."""


_SYSTEMS: dict[tuple[type, type], System] = {}
_TASKS: dict[type, TaskSystem] = {}
_CLASSES: dict[str, type] = {}
"""Classes that a configuration may name, by `type_name`. These names are never import paths."""


def register(*entries: System | TaskSystem | type) -> None:
    """Add systems, tasks and other classes of configurations.

    Raises:
        UserError: A class with fields is no dataclass, or has one that cannot be kept or has no type. Two modules of a
            package, or two presets of one file name, have a class of the same name.
    """
    for entry in entries:
        classes = entry[:2] if isinstance(entry, tuple) else (entry,)
        for cls in classes:
            name, own = type_name(cls), vars(cls).get("__annotations__", {}).values()
            if "__dataclass_fields__" not in vars(cls) and any("ClassVar" not in str(kind) for kind in own):
                raise UserError(f"{cls.__name__} has fields and is no dataclass; put "
                                "@dataclasses.dataclass(frozen=True) before it.")
            _check_fields(cls)
            # The class of the same module is replaced: a preset or a notebook's cell may have been edited.
            if (other := _CLASSES.get(name, cls).__module__) != cls.__module__:
                raise UserError(f"{cls.__name__} is a class of {other} and of {cls.__module__}; rename one of them.")
            _CLASSES[name] = cls
        if isinstance(entry, System):
            _SYSTEMS[classes] = entry
        elif isinstance(entry, TaskSystem):
            _TASKS[entry.task] = entry


def _check_fields(cls: type) -> None:
    """Raise UserError for a field that could not be kept, or a default that would have no effect."""
    names = {item.name for item in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    taken = {"type", *(("vocabulary", "statistics", "constants", "load") if hasattr(cls, "bind_unchecked") else ())}
    if found := sorted(names & taken):
        raise UserError(f"{cls.__name__} has a field {found[0]!r}, a name that jaxlm uses itself; choose another.")
    own = {name for name, value in vars(cls).items() if not isinstance(value, types.MemberDescriptorType)}  # of slots
    if found := sorted(names & own - inspect.get_annotations(cls).keys()):
        raise UserError(f"{cls.__name__}.{found[0]} has no type, so that the field keeps the default of its base; "
                        f"write `{found[0]}: TYPE = …`.")


def type_name(cls: type) -> str:
    """Return the name of a class in config.json: "MaskedLM", "their_package:Mine", or "mine.py:Mine" of a preset."""
    module = cls.__module__  # of a preset it is the path of the file
    origin = Path(module).name if module.endswith(".py") else module.partition(".")[0]
    return cls.__name__ if origin == "jaxlm" else f"{origin}:{cls.__name__}"


def is_foreign(cls: type) -> bool:
    """Return whether a class is not jaxlm's own."""
    return ":" in type_name(cls)


def find_class(name: str, where: str) -> type:
    """Return the registered class that `type_name` has named.

    Args:
        name: The name. The class of a preset is also found in another preset, as when the file has been renamed.
        where: File that has the name, for messages.
    """
    _load_packages()
    if name in _CLASSES:
        return _CLASSES[name]
    origin, _, short = name.rpartition(":")
    if origin.endswith(".py") or origin == "__main__":
        found = [cls for key, cls in _CLASSES.items() if key.endswith(f".py:{short}")]
        if len(found) == 1:
            return found[0]
        if origin == "__main__":
            raise UserError(f"{where} names the class {short} of a notebook; give a file with it as --preset FILE.")
        raise UserError(f"{where} names the class {short} of the preset {origin}; give that file as --preset {origin}.")
    if origin:
        raise UserError(
            f"{where} names the class {short} of the package {origin}, which registers none here; install the package, "
            "or give a preset that imports the class as --preset FILE."
        )
    raise UserError(f"{where} names a type {name!r} that this version of jaxlm does not know.")


def is_registered(cls: type) -> bool:
    """Return whether a configuration may name the class."""
    _load_packages()
    return _CLASSES.get(type_name(cls)) is cls


def system_of(objective: Any, model: Any = None) -> System | None:
    """Return the system of an objective and a model, by default its own; None if it is not registered.

    An objective from outside jaxlm that is not registered with the model has the system of its base class.
    """
    _load_packages()
    model = type(objective.model if model is None else model)
    for cls in class_of(objective).__mro__:
        if (found := _SYSTEMS.get((cls, model))) or not is_foreign(cls):
            return found
    return None


def task_of(task: Any) -> TaskSystem | None:
    """Return the entry of a task or of its base class; None if neither is registered."""
    _load_packages()
    return next((_TASKS[cls] for cls in type(task).__mro__ if cls in _TASKS), None)


def all_systems() -> list[System]:
    """Return the registered systems, jaxlm's first."""
    _load_packages()
    return list(_SYSTEMS.values())


def all_tasks() -> list[TaskSystem]:
    """Return the registered tasks, jaxlm's first."""
    _load_packages()
    return list(_TASKS.values())


def importable() -> list[System]:
    """Return the systems whose families are imported and fine-tuned, of jaxlm's at most one for each model."""
    return [system for system in all_systems() if system.family and not system.export_only]


@functools.cache
def _load_packages() -> None:
    """Import the modules that installed packages name as entry points; they call `register`."""
    importlib.import_module(KNOWLEDGE)
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            entry.load()
        except Exception as error:  # of code that is not jaxlm's, which most commands do not need
            log(f"The classes of {entry.dist.name} are not registered, since {entry.value} cannot be imported: "
                f"{cause(error)}.")


register(
    System(MaskedLM, Bert, "bert", "masked_lm"),
    System(MaskedLM, Roberta, "roberta", "masked_lm"),
    System(MaskedLM, XlmRoberta, "roberta", "masked_lm"),
    System(MaskedLM, Albert, "albert", "masked_lm"),
    System(MaskedLM, ModernBert, "modernbert", "masked_lm"),
    System(MaskedDiffusion, Bert, "bert", export_only=True),
    System(MaskedDiffusion, ModernBert, "modernbert", export_only=True),
    System(SpanBoundary, Bert, "bert", export_only=True),
    System(ReplacedTokens, Electra, "electra", "replaced_tokens"),
    System(MaskedLM, Deberta, "deberta", "masked_lm"),
    System(ReplacedTokens, DebertaV3, "deberta", export_only=True),
    System(CausalLM, Gpt2, "gpt2", "causal_lm"),
    System(CausalLM, Gpt1, "gpt1", "causal_lm"),
    System(CausalLM, Gpt3, "gpt2", "causal_lm"),
    System(CausalLM, ModernBertDecoder, "modernbert", "causal_lm"),
    System(CausalLM, Llama, "llama", "causal_lm"),
    System(CausalLM, Qwen3, "llama", "causal_lm"),
    System(CausalLM, Mistral, "llama", "causal_lm"),
    System(CausalLM, Gemma3, "gemma3", "causal_lm"),
    System(MaskedLM, EuroBert, "eurobert", "masked_lm"),
    System(MaskedLM, NomicBert, "nomic_bert", "masked_lm"),
    System(MaskedLM, Gte, "nomic_bert", "masked_lm"),
    System(MaskedLM, ModernBertDecoder, "modernbert", export_only=True),
    System(MaskedLM, Llama, "llama", export_only=True),
    System(MaskedLM, Qwen3, "llama", export_only=True),
    System(MaskedLM, Mistral, "llama", export_only=True),
    System(MaskedLM, Gemma3, "gemma3", export_only=True),
    System(CausalLM, Reformer, "reformer", "causal_lm"),
    System(MaskedLM, Distilbert, "distilbert"),
    System(Distillation, Distilbert, "distilbert", export_only=True),
    System(LayerDistillation, Bert, "bert", export_only=True),
    System(SpanCorruption, T5, "t5", "span_corruption"),
    System(MixtureOfDenoisers, T5, "t5", "span_corruption", export_only=True),
    System(PermutationLM, Xlnet, "xlnet", "permutation_lm"),
    System(SkipGram, Word2Vec, writer="word2vec"),
    System(BidirectionalLM, Elmo),
    TaskSystem(Classification, TextRows, "SequenceClassification", "text-classification"),
    TaskSystem(MultipleChoice, ChoiceRows, "MultipleChoice", "multiple-choice"),
    TaskSystem(Answers, AnswerRows, "QuestionAnswering", "question-answering"),
    TaskSystem(Tagging, TagRows, "TokenClassification", "token-classification"),
    TaskSystem(TextToText, PairRows),
    TaskSystem(Rerank, TextGroups, "SequenceClassification", "text-ranking"),
    DistilledClassification, Contrastive, SelfContrastive, ElectraEncoder, Model, TextData, MeshConfig,
)
