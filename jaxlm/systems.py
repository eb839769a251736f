"""The closed list of objectives and their model configurations: adding an objective is its file and two names here."""

from __future__ import annotations

from jaxlm.models.bert import BertConfig
from jaxlm.models.electra import ElectraConfig
from jaxlm.models.gpt2 import Gpt2Config
from jaxlm.models.t5 import T5Config
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.objectives.masked_lm import BertPretraining
from jaxlm.objectives.replaced_tokens import Electra
from jaxlm.objectives.span_corruption import T5Pretraining

CLASSES: tuple[type, ...] = (
    BertPretraining, BertConfig, Electra, ElectraConfig, CausalLM, Gpt2Config, T5Pretraining, T5Config,
)
