"""ALBERT (Lan et al. 2019): an encoder with narrow embeddings and shared layers."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.models.encoder import Encoder
from jaxlm.models.layers.config import PlainActivation, transformer_sizes


@dataclasses.dataclass(frozen=True)
class Albert(Encoder):
    """ALBERT encoder. The defaults are ALBERT-base, version 1 as it was pretrained; version 2 has no dropout."""

    vocab_size: int = field(30000, vocabulary=True)
    """Vocabulary size (rows of the word embedding); a run takes it from its tokenizer."""
    embedding_size: int = 128
    """Width of the embeddings, which a dense layer maps to hidden_size."""
    num_groups: int = 1
    """Number of groups of consecutive layers; the layers of a group share their parameters."""
    activation: PlainActivation = "gelu_new"
    """Activation of the feed-forward layers: gelu is the exact (erf) form, gelu_new the tanh approximation."""

    published_sizes: ClassVar = {
        "base": transformer_sizes(12, 768), "large": transformer_sizes(24, 1024),
        "xlarge": transformer_sizes(24, 2048), "xxlarge": transformer_sizes(12, 4096),
    }
    has_projection = True  # as in Transformers, even if the widths are equal

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_groups > self.num_layers:
            raise UserError(
                f"objective.model.num_groups {self.num_groups} is more than num_layers {self.num_layers}; lower it."
            )

    @property
    def embedding_width(self) -> int:
        return self.embedding_size
