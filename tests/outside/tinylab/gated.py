"""An encoder with another feed-forward: BERT with gated layers (Shazeer 2020)."""

from __future__ import annotations

import dataclasses

from jaxlm.models.bert import Bert
from jaxlm.models.layers.config import StackConfig


@dataclasses.dataclass(frozen=True)
class GatedBert(Bert):
    """BERT whose feed-forward layers compute gelu(x wi_0) ⊙ (x wi_1)."""

    @property
    def stack(self) -> StackConfig:
        """Configuration of the layers."""
        return dataclasses.replace(super().stack, activation="gated-gelu-erf")
