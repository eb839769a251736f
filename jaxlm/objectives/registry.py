"""The closed list of objectives and their model configurations: adding an objective is its file and two names here."""

from __future__ import annotations

from jaxlm.models.bert import BertConfig
from jaxlm.models.electra import ElectraConfig
from jaxlm.models.gpt2 import Gpt2Config
from jaxlm.models.t5 import T5Config
from jaxlm.objectives.bert import BertPretraining
from jaxlm.objectives.electra import Electra
from jaxlm.objectives.gpt2 import CausalLM
from jaxlm.objectives.t5 import T5Pretraining

CLASSES: tuple[type, ...] = (
    BertPretraining, BertConfig, Electra, ElectraConfig, CausalLM, Gpt2Config, T5Pretraining, T5Config,
)
