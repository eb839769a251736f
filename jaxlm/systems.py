"""The registry: the classes that configurations may name. A new system adds its objective and its model here."""

from __future__ import annotations

from jaxlm.models.bert import Bert
from jaxlm.models.electra import Electra
from jaxlm.models.gpt2 import Gpt2
from jaxlm.models.roberta import Roberta
from jaxlm.models.t5 import T5
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.objectives.masked_lm import MaskedLM
from jaxlm.objectives.replaced_tokens import ReplacedTokens
from jaxlm.objectives.span_corruption import SpanCorruption

CLASSES: tuple[type, ...] = (MaskedLM, Bert, Roberta, ReplacedTokens, Electra, CausalLM, Gpt2, SpanCorruption, T5)
