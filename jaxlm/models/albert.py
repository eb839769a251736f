"""ALBERT (Lan et al. 2019): narrow embeddings, and layers that share their parameters."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

from jaxlm.errors import UserError
from jaxlm.models.encoder import Encoder
from jaxlm.models.layers.config import PlainActivation

PUBLISHED = {"base": (12, 768), "large": (24, 1024), "xlarge": (24, 2048), "xxlarge": (12, 4096)}
"""Size → layers, width."""


@dataclasses.dataclass(frozen=True)
class Albert(Encoder):
    """An ALBERT encoder. The defaults are ALBERT-base, as version 1 was pretrained; version 2 has no dropout."""

    vocab_size: int = 30000
    """Rows of the word embedding; a run sets it from its tokenizer."""
    embedding_size: int = 128
    """Width of the embeddings, which a dense layer brings to hidden_size."""
    num_groups: int = 1
    """Groups of consecutive layers; the layers of a group share their parameters."""
    activation: PlainActivation = "gelu_new"
    """gelu is the exact (erf) form, gelu_new the tanh approximation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_groups > self.num_layers:
            raise UserError(
                f"objective.model.num_groups {self.num_groups} is more than num_layers {self.num_layers}; lower it."
            )

    @classmethod
    def published(cls, size: str, **changes: Any) -> Self:
        """A published size by name: base, large, xlarge or xxlarge. Heads are 64 wide, as the paper has them."""
        layers, hidden = PUBLISHED[size]
        shape = dict(num_layers=layers, hidden_size=hidden, num_heads=hidden // 64, intermediate_size=4 * hidden)
        return cls(**(shape | changes))

    @property
    def embedding_width(self) -> int:
        return self.embedding_size

    @property
    def has_projection(self) -> bool:
        return True  # as in Transformers, where the widths may be equal, too

    @property
    def groups(self) -> int:
        return self.num_groups
