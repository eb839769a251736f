"""BERT (Devlin et al. 2018)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxlm.models.encoder import Encoder
from jaxlm.models.layers.config import transformer_sizes


@dataclasses.dataclass(frozen=True)
class Bert(Encoder):
    """BERT encoder. The defaults are bert-base-uncased."""

    published_sizes: ClassVar = {
        "tiny": transformer_sizes(2, 128), "mini": transformer_sizes(4, 256), "small": transformer_sizes(4, 512),
        "medium": transformer_sizes(8, 512), "base": transformer_sizes(12, 768), "large": transformer_sizes(24, 1024),
    }
