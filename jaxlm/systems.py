"""The registry: every system that jaxlm pretrains. A new one is its own files, and an entry here."""

from __future__ import annotations

from typing import NamedTuple

from jaxlm.models.bert import Bert
from jaxlm.models.electra import Electra
from jaxlm.models.gpt2 import Gpt2
from jaxlm.models.t5 import T5
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.replaced_tokens import ReplacedTokens
from jaxlm.objectives.span_corruption import SpanCorruption


class System(NamedTuple):
    """An objective on a model, and the module of jaxlm.huggingface whose FAMILY exports and imports it; "" where
    Transformers has no class for it. Of several with one model_type, the first is what an import gives."""

    objective: type
    model: type
    family: str = ""


SYSTEMS = (
    System(MaskedLM, Bert, "bert"),
    System(ReplacedTokens, Electra, "electra"),
    System(CausalLM, Gpt2, "gpt2"),
    System(SpanCorruption, T5, "t5"),
)

CLASSES: tuple[type, ...] = tuple(dict.fromkeys(cls for system in SYSTEMS for cls in (system.objective, system.model)))
"""The classes that a configuration may name."""
