"""DistilBERT (Sanh et al. 2019)."""

from __future__ import annotations

import dataclasses

from jaxlm.models.base import FineTuning
from jaxlm.models.bert import Bert
from jaxlm.models.encoder import Encoder
from jaxlm.models.layers.config import StackConfig
from jaxlm.tokenizers.template import Template


@dataclasses.dataclass(frozen=True)
class Distilbert(Encoder):
    """DistilBERT encoder: BERT with half the layers and no segment types. The defaults are distilbert-base-uncased."""

    num_layers: int = 6
    """Number of Transformer layers."""
    type_vocab_size: int = 0
    """Number of segment types: none."""

    template = Template(single="cls $A sep", pair="cls $A sep $B sep", needs=("pad", "cls", "sep", "mask"))

    @property
    def stack(self) -> StackConfig:
        return dataclasses.replace(super().stack, attention_output_dropout=0.0)  # as in its Transformers class

    @property
    def fine_tuning(self) -> FineTuning:
        # The template has segment types, because a teacher that reads the same rows may need them.
        return FineTuning(dataclasses.replace(self.template, pair=Bert.template.pair), activation="relu")
