"""DistilBERT (Sanh et al. 2019)."""

from __future__ import annotations

import dataclasses

from jaxlm.models.encoder import Encoder


@dataclasses.dataclass(frozen=True)
class Distilbert(Encoder):
    """A DistilBERT encoder: BERT with half its layers, without segment types. The defaults are
    distilbert-base-uncased."""

    num_layers: int = 6
    """Transformer layers."""
    type_vocab_size: int = 0
    """Segment types: none."""
