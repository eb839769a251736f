"""ModernBERT (Warner et al. 2024), and the Ettin encoders and decoders (Weller et al. 2025)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Literal

import jax
from jaxtyping import Array, Float

from jaxlm.fields import field
from jaxlm.models.base import FineTuning, Model
from jaxlm.models.decoder import EitherDirection
from jaxlm.models.encoder import Encoder
from jaxlm.models.heads import TransformHead
from jaxlm.models.layers.config import GATED, PlainActivation, StackConfig, check_gated, kernel_init
from jaxlm.models.layers.embeddings import Embeddings
from jaxlm.models.layers.rotary import Rope
from jaxlm.models.layers.stack import call
from jaxlm.tokenizers.template import Template
from jaxlm.types import Params


def sizes(layers: int, width: int, heads: int, inner: int, **others: Any) -> dict[str, Any]:
    """Return the fields of a published size."""
    return dict(num_layers=layers, hidden_size=width, num_heads=heads, intermediate_size=inner) | others


ETTIN = {
    "17m": sizes(7, 256, 4, 384), "32m": sizes(10, 384, 6, 576), "68m": sizes(19, 512, 8, 768),
    "150m": sizes(22, 768, 12, 1152), "400m": sizes(28, 1024, 16, 2624), "1b": sizes(28, 1792, 28, 3840),
}
"""Sizes of Ettin, the same for encoders and decoders."""
MMBERT = dict(vocab_size=256_000, local_theta=160_000.0, classifier_pooling="mean")
"""Fields of mmBERT (Marone et al. 2025), beside its sizes."""


@dataclasses.dataclass(frozen=True)
class ModernBert(Encoder):
    """ModernBERT encoder: pre-norm, gated, without biases, with rotary positions. The defaults are ModernBERT-base.

    Every third layer attends to all tokens, the others to `local_attention // 2` tokens before and after (129 keys, as
    in the released code, with 128). Norms are LayerNorms without bias; the first layer has none before its attention.

    Parameters: `embeddings/{word,norm}`, `encoder/layers/…` (stacked, with one row less in `attention_norm`),
    `encoder/final_norm`, `head/{dense,norm}`, which fine-tuned models keep, and `mlm_head/bias`.
    """

    vocab_size: int = field(50368, vocabulary=True)
    """Vocabulary size (rows of the word embedding); a run takes it from its tokenizer."""
    num_layers: int = field(22, range="[2, inf)")
    """Number of Transformer layers. Of a single one no norm before attention would be left, and Orbax saves no empty
    array."""
    intermediate_size: int = 1152
    """Width of the feed-forward layers, which are gated."""
    activation: PlainActivation = "gelu"
    """Activation of the gate: gelu is the exact (erf) form, gelu_new the tanh approximation."""
    max_positions: int = 8192
    """Maximum sequence length."""
    type_vocab_size: int = 0
    """Number of segment types: none."""
    dropout: float = field(0.0, recipe=True, range="[0, 1)")
    """Dropout rate of the attention output, the only one in the published training, at 0.1. The released configurations
    have 0."""
    mlp_dropout: float = field(0.0, recipe=True, range="[0, 1)")
    """Dropout rate of the feed-forward output."""
    attention_dropout: float = field(0.0, recipe=True, range="[0, 1)")
    """Dropout rate of attention probabilities. Above 0, only the TPU's kernel for short rows in bfloat16 is fused."""
    norm_eps: float = field(1e-5, range="(0, inf)")
    """Epsilon of the norms."""
    local_attention: int = field(128, range="[2, inf)")
    """Width of local attention: half of it to either side."""
    global_period: int = field(3, range="[1, inf)")
    """Layers 0, global_period, 2 · global_period, … attend to all tokens."""
    global_theta: float = field(160_000.0, range="(0, inf)")
    """Base of rotary positions in layers that attend to all tokens."""
    local_theta: float = field(10_000.0, range="(0, inf)")
    """Base of rotary positions in layers with local attention: 160,000 in Ettin."""
    classifier_pooling: Literal["cls", "mean"] = field("cls", recipe=True, kept=True)
    """Vector of a text for tasks: the hidden state of [CLS], or the mean of all tokens."""

    template = Template(single="cls $A sep", pair="cls $A sep $B sep", needs=("pad", "cls", "sep", "mask"))
    published_sizes: ClassVar = {
        "base": {}, "large": sizes(28, 1024, 16, 2624),
        **{f"ettin-{name}": size | {"local_theta": 160_000.0} for name, size in ETTIN.items()},
        "mmbert-small": MMBERT | sizes(22, 384, 6, 1152), "mmbert-base": MMBERT | sizes(22, 768, 12, 1152),
    }
    head_activation = "gelu"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_gated(self)

    @property
    def plan_depths(self) -> tuple[int, int]:
        return 1 + self.global_period, 1 + 2 * self.global_period

    @property
    def summary_token(self) -> str:
        return "mean" if self.classifier_pooling == "mean" else "first"

    @property
    def fine_tuning(self) -> FineTuning:
        return FineTuning(self.template, activation=None, has_transform=True)

    @property
    def band(self) -> int:
        """Number of tokens from itself on, to either side, that a token attends to in local layers."""
        return self.local_attention // 2 + 1

    @property
    def stack(self) -> StackConfig:
        return StackConfig.of(
            self, activation=GATED[self.activation], norm_placement="pre", final_norm=True, has_first_norm=False,
            use_bias=False, band=self.band, band_period=self.global_period,
            rope=Rope(self.global_theta), band_rope=Rope(self.local_theta),
            residual_init_scale=1.0 / math.sqrt(2 * self.num_layers),
        )

    def in_direction(self, is_causal: bool) -> Model:
        return self.as_type(ModernBertDecoder) if is_causal else self

    def init(self, key: jax.Array) -> Params:
        key_model, key_head = jax.random.split(key)
        params = super().init(key_model)
        return params | {"head": self._head.init_params(key_head), "mlm_head": {"bias": params["mlm_head"]["bias"]}}

    def token_features(self, params: Params, hidden: Float[Array, "*batch hidden"]) -> Float[Array, "*batch hidden"]:
        return call(self._head, params["head"], hidden)

    @property
    def _embeddings(self) -> Embeddings:
        init = kernel_init(self.stack)
        return Embeddings(
            self.vocab_size, self.hidden_size, 0, 0, self.norm_eps, 0.0, init, init, self.dtype, use_bias=False
        )

    @property
    def _head(self) -> TransformHead:
        stack = self.stack
        std = self.init_std * stack.residual_init_scale
        return TransformHead(
            dataclasses.replace(stack, activation=self.head_activation, init_std=std), self.hidden_size
        )


@dataclasses.dataclass(frozen=True)
class ModernBertDecoder(EitherDirection, ModernBert):
    """Ettin decoder: the layers of ModernBERT with causal attention. The defaults are Ettin 150M.

    Local layers attend to `local_attention // 2` tokens, up to the token itself, as in Transformers' class. The
    published training attended to one more. Parameters have the names of the encoder, which it is with
    `is_causal` False.
    """

    local_theta: float = field(160_000.0, range="(0, inf)")
    """Base of rotary positions in layers with local attention."""

    published_sizes: ClassVar = ETTIN

    @property
    def fine_tuning(self) -> FineTuning:
        return super().fine_tuning._replace(has_transform=True)

    @property
    def band(self) -> int:
        return self.local_attention // 2 + (not self.is_causal)

    def in_direction(self, is_causal: bool) -> Model:
        return super().in_direction(True) if is_causal else self.as_type(ModernBert)
