"""BERT (Devlin et al. 2018)."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

from jaxlm.models.encoder import Encoder

PUBLISHED = {"tiny": (2, 128), "mini": (4, 256), "small": (4, 512), "medium": (8, 512), "base": (12, 768),
             "large": (24, 1024)}
"""Size → layers, width."""


@dataclasses.dataclass(frozen=True)
class Bert(Encoder):
    """A BERT encoder. The defaults are bert-base-uncased."""

    @classmethod
    def published(cls, size: str, **changes: Any) -> Self:
        """A published size by name: tiny, mini, small, medium, base or large (all uncased)."""
        layers, hidden = PUBLISHED[size]
        shape = dict(num_layers=layers, hidden_size=hidden, num_heads=hidden // 64, intermediate_size=4 * hidden)
        return cls(**(shape | changes))
