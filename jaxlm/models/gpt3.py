"""GPT-3 (Brown et al. 2020)."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

from jaxlm.errors import UserError
from jaxlm.models.gpt2 import Gpt2
from jaxlm.models.layers.config import StackConfig

PUBLISHED = {
    "125m": (12, 768, 12), "350m": (24, 1024, 16), "760m": (24, 1536, 16), "1.3b": (24, 2048, 16),
    "2.7b": (32, 2560, 32), "6.7b": (32, 4096, 32), "13b": (40, 5120, 40), "175b": (96, 12288, 96),
}
"""Size → layers, width, heads (table 2.1). The paper prints 24 heads of 128 for the width 2,048 of 1.3B, and the width
5,140 for the 40 heads of 128 of 13B; what is here divides."""


@dataclasses.dataclass(frozen=True)
class Gpt3(Gpt2):
    """A GPT-3 decoder: GPT-2 with longer contexts, in which every second layer sees a band only. The defaults are the
    125M model."""

    max_positions: int = 2048
    """Learned positions: the longest sequence."""
    band: int = 256
    """In layers 1, 3, 5, … a token sees so many tokens up to itself; 0: every layer sees all, as GPT-2. The paper has
    such layers "in the manner of the Sparse Transformer" and no width; 256 is GPT-Neo's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.band < 0 or (self.band and self.num_layers % 2):
            raise UserError(
                f"objective.model.band is {self.band} and num_layers {self.num_layers}; a band must be at least 1, and "
                "its layers take turns with others, so that they are an even number; 0 is for no band."
            )

    @classmethod
    def published(cls, size: str, **changes: Any) -> Self:
        """A published size by name: 125m, 350m, 760m, 1.3b, 2.7b, 6.7b, 13b or 175b."""
        layers, hidden, heads = PUBLISHED[size]
        shape = dict(num_layers=layers, hidden_size=hidden, num_heads=heads, intermediate_size=4 * hidden)
        return cls(**(shape | changes))

    @property
    def stack(self) -> StackConfig:
        return dataclasses.replace(super().stack, band=self.band or None)
