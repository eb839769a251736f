"""Llama (Touvron et al. 2023) and the families with its layers: EuroBERT, Qwen 3, Mistral, Gemma 3."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.models.base import FineTuning, Model
from jaxlm.models.decoder import ENCODER_TEMPLATE, EitherDirection
from jaxlm.models.encoder import Encoder
from jaxlm.models.layers.config import GATED, PlainActivation, StackConfig, check_gated
from jaxlm.models.layers.embeddings import Embeddings
from jaxlm.models.layers.rotary import Rope
from jaxlm.models.layers.stack import init_stack, stack_flops
from jaxlm.types import Params


def _sizes(layers: int, width: int, heads: tuple[int, int, int], inner: int, **others: Any) -> dict[str, Any]:
    """Return the fields of a published size; `heads` are query heads, key/value heads, and their width."""
    fields = dict(zip(("num_heads", "num_kv_heads", "head_dim"), heads, strict=True))
    return fields | dict(num_layers=layers, hidden_size=width, intermediate_size=inner) | others


_SMOLLM2 = dict(vocab_size=49152, tied_head=True, rope_theta=100_000.0)
_LLAMA_3_2 = dict(
    max_positions=131_072, tied_head=True, rope_theta=500_000.0, rope_scaling=(32.0, 1.0, 4.0, 8192.0)
)


@dataclasses.dataclass(frozen=True)
class LlamaEncoder(Encoder):
    """Bidirectional encoder with Llama's layers: pre-norm with RMSNorm, gated, with rotary positions.

    Consecutive query heads share a key/value head (grouped-query attention, Ainslie et al. 2023). The default sizes of
    all families are those of EuroBERT-210m.

    Parameters: `embeddings/word`, `encoder/layers/…` (stacked), `encoder/final_norm`, and `lm_head` if the output
    matrix is not the embedding.
    """

    vocab_size: int = field(128256, vocabulary=True)
    """Vocabulary size (rows of the word embedding); a run takes it from its tokenizer."""
    num_kv_heads: int = 12
    """Number of key/value heads; must divide num_heads."""
    head_dim: int = 64
    """Width of an attention head; num_heads · head_dim need not be hidden_size."""
    activation: PlainActivation = "silu"
    """Activation of the gate of the feed-forward layers."""
    max_positions: int = field(8192, recipe=True, kept=True, range="[1, inf)")
    """Maximum sequence length."""
    type_vocab_size: int = 0
    """Number of segment types: none."""
    dropout: float = field(0.0, recipe=True, range="[0, 1)")
    """Dropout rate of the attention output and the feed-forward output. The published models have none."""
    attention_dropout: float = field(0.0, recipe=True, range="[0, 1)")
    """Dropout rate of attention probabilities. Above 0, only the TPU's kernel for short rows in bfloat16 is fused."""
    norm_eps: float = field(1e-5, range="(0, inf)")
    """Epsilon of the norms."""
    init_std: float = field(0.02, range="[0, inf)")
    """Standard deviation of the normal that initializes matrices and the word embedding."""
    tied_head: bool = False
    """Use the word embedding as the output matrix."""
    attention_bias: bool = False
    """Whether the dense layers of attention have biases."""
    mlp_bias: bool = False
    """Whether the feed-forward layers have biases."""
    rope_theta: float = field(10_000.0, recipe=True, kept=True, range="(0, inf)")
    """Base of rotary positions."""
    rope_scaling: tuple[float, ...] = field((), recipe=True, kept=True)
    """Scaling of rotary frequencies: none; a factor for all; or Llama 3.1's factor, low, high and length (see
    `layers.rotary.Rope`)."""

    has_query_norm: ClassVar[bool] = False
    """Whether the queries and keys of each head are normalized before the rotary positions."""
    output_params = ("lm_head",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_gated(self)
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"objective.model.num_heads {self.num_heads} is not divisible by num_kv_heads "
                            f"{self.num_kv_heads}; change one of them.")
        factor, low, high, length = (*self.rope_scaling, *(1.0, 0.0, 1.0, 1.0)[len(self.rope_scaling) :])[:4]
        if len(self.rope_scaling) not in (0, 1, 4) or min(factor, length) <= 0 or not 0 <= low < high:
            raise UserError(f"objective.model.rope_scaling is {self.rope_scaling}; give a factor, or factor, low, high "
                            "and length with low below high, or nothing.")

    @property
    def band(self) -> int | None:
        """Number of tokens from itself on that a token attends to; None for all."""
        return None

    @property
    def stack(self) -> StackConfig:
        biases = ("query", "key", "value", "out") * self.attention_bias + ("wi_0", "wi_1", "wo") * self.mlp_bias
        rope = Rope(self.rope_theta, self.rope_scaling)
        return StackConfig.of(
            self, activation=GATED[self.activation], norm="rms", norm_placement="pre", final_norm=True, init="normal",
            use_bias=biases, has_query_norm=self.has_query_norm, rope=rope, band_rope=rope, band=self.band,
            band_period=1, full_layer=None,
        )

    def init(self, key: jax.Array) -> Params:
        keys, ids = jax.random.split(key, 3), jnp.zeros((1, 2), jnp.int32)
        params = {
            "embeddings": self._embeddings.init(keys[0], ids, ids)["params"],
            "encoder": init_stack(self.stack, keys[1]),
        }
        if not self.tied_head:
            kernel = nn.initializers.normal(self.init_std)
            params["lm_head"] = {"kernel": kernel(keys[2], (self.hidden_size, self.vocab_size), jnp.float32)}
        return params

    def token_features(self, params: Params, hidden: Float[Array, "*batch hidden"]) -> Float[Array, "*batch hidden"]:
        return hidden

    def output_matrix(self, params: Params) -> tuple[Float[Array, "vocab hidden"], None]:
        """Return the word embedding or the matrix of the head, and no bias."""
        return params["embeddings"]["word"]["embedding"] if self.tied_head else params["lm_head"]["kernel"].T, None

    def forward_flops(self, length: int, predicted: int = 0) -> float:
        return stack_flops(self.stack, length) + 2.0 * predicted * self.hidden_size * self.vocab_size

    @property
    def _embeddings(self) -> Embeddings:
        init = nn.initializers.normal(self.init_std)
        return Embeddings(self.vocab_size, self.hidden_size, 0, 0, None, 0.0, init, init, self.dtype)


@dataclasses.dataclass(frozen=True)
class EuroBert(LlamaEncoder):
    """EuroBERT encoder (Boizard et al. 2025).

    The published model pads with its end symbol, whose input embedding gets no gradients in Transformers; here it is
    trained like any other.
    """

    rope_theta: float = field(250_000.0, recipe=True, kept=True, range="(0, inf)")
    """Base of rotary positions: 10,000 before the last phase of the published training."""
    classifier_pooling: Literal["late", "mean", "bos"] = field("late", recipe=True, kept=True)
    """Vector of a text for tasks: that of the first token (bos), the mean of all tokens, or the mean after the dense
    layer of the classifier (late)."""

    template = ENCODER_TEMPLATE
    published_sizes: ClassVar = {
        "210m": {}, "610m": _sizes(26, 1152, (18, 6, 64), 4096), "2.1b": _sizes(32, 2304, (18, 6, 128), 6144),
    }

    @property
    def summary_token(self) -> str:
        return "first" if self.classifier_pooling == "bos" else "mean"

    @property
    def fine_tuning(self) -> FineTuning:
        return FineTuning(self.template, activation="gelu", pools_late=self.classifier_pooling == "late")

    def in_direction(self, is_causal: bool) -> Model:
        return self.as_type(Llama) if is_causal else self


@dataclasses.dataclass(frozen=True)
class Llama(EitherDirection, LlamaEncoder):
    """Llama decoder, also of SmolLM2. Parameters have the names of the encoder."""

    published_sizes: ClassVar = {
        "3.2-1b": _sizes(16, 2048, (32, 8, 64), 8192, **_LLAMA_3_2),
        "3.2-3b": _sizes(28, 3072, (24, 8, 128), 8192, **_LLAMA_3_2),
        "smollm2-135m": _sizes(30, 576, (9, 3, 64), 1536, init_std=0.041666666666666664, **_SMOLLM2),
        "smollm2-360m": _sizes(32, 960, (15, 5, 64), 2560, **_SMOLLM2),
    }

    def in_direction(self, is_causal: bool) -> Model:
        """Return the model in a direction; a decoder that has all that a EuroBERT has becomes one."""
        fits = type(self) in (Llama, Mistral) and self.band is None and not self.mlp_bias
        is_encoder = self.is_causal and not is_causal and fits
        return self.as_type(EuroBert) if is_encoder else super().in_direction(is_causal)


@dataclasses.dataclass(frozen=True)
class Qwen3(Llama):
    """Qwen 3 decoder (Yang et al. 2025): queries and keys are normalized."""

    has_query_norm = True
    published_sizes: ClassVar = {"0.6b": _sizes(
        28, 1024, (16, 8, 128), 3072, vocab_size=151936, max_positions=40_960, norm_eps=1e-6, tied_head=True,
        rope_theta=1_000_000.0,
    )}


@dataclasses.dataclass(frozen=True)
class Mistral(Llama):
    """Mistral decoder (Jiang et al. 2023): a token attends to a window of tokens."""

    window: int | None = field(4096, range="[1, inf)")
    """Number of tokens, itself included, that a token attends to; none means all before it. With bidirectional
    attention, that number of tokens to either side beside itself."""

    published_sizes: ClassVar = {
        "7b": _sizes(32, 4096, (32, 8, 128), 14336, vocab_size=32000, max_positions=32_768),
    }

    @property
    def band(self) -> int | None:
        return self.window and self.window + (not self.is_causal)


@dataclasses.dataclass(frozen=True)
class Gemma3(Llama):
    """Gemma 3 decoder of text (Gemma Team 2025): norms of the inputs and outputs of sublayers, and mostly local layers.

    The parameter of a norm is its scale less 1. Word embeddings are multiplied by √hidden_size.
    """

    activation: PlainActivation = "gelu_new"
    """Activation of the gate of the feed-forward layers."""
    score_width: int = field(256, range="[1, inf)")
    """Attention scores are divided by its square root."""
    window: int = field(512, range="[1, inf)")
    """Number of tokens, itself included, that a token attends to in local layers. With bidirectional attention, that
    number of tokens to either side beside itself."""
    global_period: int = field(6, range="[1, inf)")
    """Layers global_period - 1, 2 global_period - 1, … attend to all tokens (before); others are local."""
    local_theta: float = field(10_000.0, range="(0, inf)")
    """Base of rotary positions in local layers."""

    has_query_norm = True
    published_sizes: ClassVar = {"270m": _sizes(
        18, 640, (4, 1, 256), 2048, vocab_size=262_144, max_positions=32_768, norm_eps=1e-6, tied_head=True,
        rope_theta=1_000_000.0,
    )}

    @property
    def plan_depths(self) -> tuple[int, int]:
        return self.global_period, 2 * self.global_period

    @property
    def stack(self) -> StackConfig:
        return dataclasses.replace(
            super().stack, norm_placement="both", norm_offset=1.0, score_width=self.score_width,
            band=self.window + (not self.is_causal), band_period=self.global_period,
            full_layer=self.global_period - 1, band_rope=Rope(self.local_theta),
        )

    @property
    def _embeddings(self) -> Embeddings:
        return super()._embeddings.clone(scale=self.hidden_size**0.5)
