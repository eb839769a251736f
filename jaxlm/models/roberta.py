"""RoBERTa (Liu et al. 2019)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Self

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxlm.fields import field
from jaxlm.models.base import FineTuning, Inputs
from jaxlm.models.encoder import Encoder
from jaxlm.models.layers.config import transformer_sizes
from jaxlm.tokenizers.template import Template
from jaxlm.tokenizers.vocabulary import Vocabulary


@dataclasses.dataclass(frozen=True)
class Roberta(Encoder):
    """RoBERTa encoder: BERT without segment types, and with fairseq's positions. The defaults are roberta-base.

    Positions start at the row after that of the padding symbol's id.
    """

    vocab_size: int = field(50265, vocabulary=True)
    """Vocabulary size (rows of the word embedding); a run takes it from its tokenizer."""
    type_vocab_size: int = 1
    """Number of segment types: 1, which Transformers' class requires."""
    norm_eps: float = field(1e-5, range="(0, inf)")
    """Epsilon of the norms."""
    padding_id: int = field(1, vocabulary=True)
    """Id of the padding symbol, which a run takes from its tokenizer; positions start at padding_id + 1."""

    template = Template(single="cls $A sep", pair="cls $A sep sep $B sep", needs=("pad", "cls", "sep", "mask"))
    published_sizes: ClassVar = {"base": transformer_sizes(12, 768), "large": transformer_sizes(24, 1024)}
    head_activation = "gelu"

    @property
    def fine_tuning(self) -> FineTuning:
        return FineTuning(self.template, has_input_dropout=True)

    @property
    def first_position(self) -> int:
        """Row of the position embedding for the first token."""
        return self.padding_id + 1

    def _positions(self, inputs: Inputs) -> Int[Array, "#batch length"]:
        """Return the row of the position embedding for each token; padding on the left is not counted."""
        if inputs.mask is None or inputs.documents is not None:
            return super()._positions(inputs)
        mask = inputs.mask.astype(jnp.int32)
        return self.padding_id + mask * jnp.cumsum(mask, axis=1)

    def for_vocabulary(self, vocabulary: Vocabulary) -> Self:
        return dataclasses.replace(super().for_vocabulary(vocabulary), padding_id=max(vocabulary.pad, 0))
