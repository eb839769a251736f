"""Nomic BERT (Nussbaum et al. 2024) and GTE (Zhang et al. 2024): BERT with rotary positions and gated layers."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxlm.fields import field
from jaxlm.models.encoder import Encoder
from jaxlm.models.layers.config import GATED, PlainActivation, StackConfig, check_gated
from jaxlm.models.layers.embeddings import Embeddings
from jaxlm.models.layers.rotary import Rope
from jaxlm.models.roberta import Roberta
from jaxlm.tokenizers.template import Template


@dataclasses.dataclass(frozen=True)
class RotaryBert(Encoder):
    """BERT's post-norm encoder with rotary positions and gated feed-forward layers. The defaults are Nomic BERT's."""

    vocab_size: int = field(30528, vocabulary=True)
    """Vocabulary size (rows of the word embedding); a run takes it from its tokenizer, rounded up to 64."""
    activation: PlainActivation = "silu"
    """Activation of the gate of the feed-forward layers."""
    max_positions: int = 2048
    """Maximum sequence length."""
    dropout: float = field(0.0, recipe=True, range="[0, 1)")
    """Dropout rate of the embeddings, the attention output and the feed-forward output."""
    attention_dropout: float = field(0.0, recipe=True, range="[0, 1)")
    """Dropout rate of attention probabilities. Above 0, only the TPU's kernel for short rows in bfloat16 is fused."""
    rope_theta: float = field(1000.0, range="(0, inf)")
    """Base of rotary positions."""

    biases: ClassVar[tuple[str, ...]] = ("dense", "norm")
    """Names of what has biases in the layers and the head (see `StackConfig.use_bias`)."""
    vocab_multiple = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_gated(self)

    @property
    def template(self) -> Template:
        """Special symbols around one and two texts: BERT's, or RoBERTa's with fewer than two segment types."""
        return super().template if self.type_vocab_size > 1 else Roberta.template

    @property
    def stack(self) -> StackConfig:
        return StackConfig.of(
            self, activation=GATED[self.activation], init="normal", use_bias=self.biases, rope=Rope(self.rope_theta)
        )

    @property
    def _embeddings(self) -> Embeddings:
        return super()._embeddings.clone(num_positions=0)


@dataclasses.dataclass(frozen=True)
class NomicBert(RotaryBert):
    """Nomic BERT encoder. The defaults are nomic-bert-2048."""

    type_vocab_size: int = field(2, range="[1, inf)")
    """Number of segment types."""
    published_sizes: ClassVar = {"base": {}}


@dataclasses.dataclass(frozen=True)
class Gte(RotaryBert):
    """GTE encoder. Attention and the feed-forward output have biases; the product with the gate has dropout, too."""

    biases = (*RotaryBert.biases, "query", "key", "value", "out", "wo")
    published_sizes: ClassVar = {"multilingual-base": dict(
        vocab_size=250_048, activation="gelu", max_positions=8192, type_vocab_size=1, dropout=0.1, rope_theta=160_000.0,
    )}
    head_activation = "gelu"

    @property
    def stack(self) -> StackConfig:
        return dataclasses.replace(super().stack, intermediate_dropout=self.dropout)
