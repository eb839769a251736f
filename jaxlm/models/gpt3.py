"""GPT-3 (Brown et al. 2020)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxlm.errors import UserError
from jaxlm.models.gpt2 import Gpt2
from jaxlm.models.layers.config import StackConfig, transformer_sizes


@dataclasses.dataclass(frozen=True)
class Gpt3(Gpt2):
    """GPT-3 decoder: GPT-2 with a longer context and banded attention in every second layer. The defaults are 125M."""

    max_positions: int = 2048
    """Maximum sequence length (rows of the position embedding)."""
    band: int = 256
    """Number of tokens, up to itself, that a token attends to in layers 1, 3, 5, …; 0 for full attention, as in GPT-2.
    The paper has such layers "in the manner of the Sparse Transformer" and no width; 256 is GPT-Neo's."""

    # Table 2.1. The paper prints 24 heads of 128 for 1.3B's width of 2,048, and a width of 5,140 for 13B's 40 heads of
    # 128. Here the heads divide the width.
    published_sizes: ClassVar = {
        "125m": transformer_sizes(12, 768), "350m": transformer_sizes(24, 1024),
        "760m": transformer_sizes(24, 1536, 16), "1.3b": transformer_sizes(24, 2048, 16),
        "2.7b": transformer_sizes(32, 2560, 32), "6.7b": transformer_sizes(32, 4096, 32),
        "13b": transformer_sizes(40, 5120, 40), "175b": transformer_sizes(96, 12288, 96),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.band < 0 or (self.band and self.num_layers % 2):
            raise UserError(
                f"objective.model.band is {self.band} and num_layers {self.num_layers}; every second layer has the "
                "band, so num_layers must be even, or band 0 for none."
            )

    @property
    def stack(self) -> StackConfig:
        return dataclasses.replace(super().stack, band=self.band or None)
