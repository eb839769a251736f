"""GPT-2 (Radford et al. 2019): a causal, pre-norm decoder with learned positions and tied embeddings."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.models.layers.dropout import dropout
from jaxlm.models.layers.stack import (
    AttentionKind,
    DType,
    PlainActivation,
    RematPolicy,
    Stack,
    StackConfig,
    empty_cache,
)

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Gpt2Config:
    """A GPT-2 decoder. The defaults are the 124M model (first announced as 117M)."""

    vocab_size: int = 50257
    """Rows of the word embedding, which is also the output matrix; a run sets it from its tokenizer."""
    hidden_size: int = 768
    """Width of the residual stream."""
    num_layers: int = 12
    """Transformer layers."""
    num_heads: int = 12
    """Attention heads; must divide hidden_size."""
    intermediate_size: int = 3072
    """Width of the feed-forward layer."""
    max_positions: int = 1024
    """Learned positions: the longest sequence."""
    activation: PlainActivation = "gelu_new"
    """gelu_new is the tanh approximation that GPT-2 uses, gelu the exact (erf) form."""
    dropout: float = field(0.0, recipe=True)
    """Dropout after the embeddings, the attention output and the feed-forward output. The released code has none."""
    attention_dropout: float = field(0.0, recipe=True)
    """Dropout on attention probabilities; above 0 it rules out fused attention kernels while training."""
    norm_eps: float = 1e-5
    """Epsilon of LayerNorm."""
    init_std: float = 0.02
    """Standard deviation of the normal that matrices and word embeddings start from."""
    position_init_std: float = 0.01
    """The same for the position embedding: 0.01 in the released code, 0.02 in Transformers."""
    residual_init_scale: float | None = None
    """Factor on init_std for matrices that write to the residual stream; none means 1/sqrt(2 num_layers)."""
    dtype: DType = field("float32", recipe=True)
    """Compute type; parameters and the softmax stay in float32."""
    remat: RematPolicy = field("none", resumable=True)
    """What the backward pass recomputes: none, dots (keeps matrix products), full (keeps layer inputs)."""
    attention: AttentionKind = field("auto", resumable=True)
    """Attention kernel: auto takes cuDNN's fused one on GPUs that have it, XLA's elsewhere."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "intermediate_size", "max_positions"):
            if getattr(self, name) < 1:
                raise UserError(f"objective.model.{name} is {getattr(self, name)}; it must be at least 1.")
        if self.hidden_size % self.num_heads:
            raise UserError(
                f"hidden_size {self.hidden_size} is not divisible by num_heads {self.num_heads}; change one of them."
            )
        for name in ("dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise UserError(f"objective.model.{name} is {getattr(self, name)}; it must be in [0, 1).")
        if not 0.0 < self.norm_eps < math.inf:
            raise UserError(f"objective.model.norm_eps is {self.norm_eps}; it must be above 0, and finite.")

    @classmethod
    def published(cls, size: str, **changes: Any) -> Gpt2Config:
        """A published size by name: small (124M), medium (355M), large (774M) or xl (1.5B)."""
        layers, hidden, heads = PUBLISHED[size]
        shape = dict(num_layers=layers, hidden_size=hidden, num_heads=heads, intermediate_size=4 * hidden)
        return cls(**(shape | changes))

    @property
    def stack(self) -> StackConfig:
        scale = self.residual_init_scale
        return StackConfig(
            hidden_size=self.hidden_size, num_layers=self.num_layers, num_heads=self.num_heads,
            head_dim=self.hidden_size // self.num_heads, intermediate_size=self.intermediate_size,
            activation=self.activation, norm_placement="pre", norm_eps=self.norm_eps, final_norm=True, causal=True,
            dropout=self.dropout, attention_dropout=self.attention_dropout, init="normal", init_std=self.init_std,
            residual_init_scale=1.0 / math.sqrt(2 * self.num_layers) if scale is None else scale,
            dtype=self.dtype, remat=self.remat, attention=self.attention,
        )


PUBLISHED = {"small": (12, 768, 12), "medium": (24, 1024, 16), "large": (36, 1280, 20), "xl": (48, 1600, 25)}


class Embeddings(nn.Module):
    """Word + position, then dropout."""

    config: Gpt2Config

    def setup(self) -> None:
        c = self.config
        normal = nn.initializers.normal
        self.word = nn.Embed(c.vocab_size, c.hidden_size, dtype=c.dtype, embedding_init=normal(c.init_std))
        self.position = nn.Embed(
            c.max_positions, c.hidden_size, dtype=c.dtype, embedding_init=normal(c.position_init_std)
        )

    def __call__(self, input_ids, positions, deterministic):
        x = self.word(input_ids) + self.position(positions)
        return dropout(x, self.config.dropout, None if deterministic else self.make_rng("dropout"))


class Gpt2(nn.Module):
    """Embeddings and stack; the output matrix is the word embedding."""

    config: Gpt2Config

    def setup(self) -> None:
        self.embeddings = Embeddings(self.config)
        self.decoder = Stack(self.config.stack)

    def __call__(self, input_ids, positions, mask=None, cache=None, index=None, deterministic=True):
        x = self.embeddings(input_ids, positions, deterministic)
        return self.decoder(x, mask=mask, cache=cache, index=index, deterministic=deterministic)


def init(config: Gpt2Config, key: jax.Array) -> Params:
    """Fresh parameters, float32."""
    ids = jnp.zeros((1, 2), jnp.int32)
    return Gpt2(config).init({"params": key}, ids, ids)["params"]


def document_positions(segment_ids: Int[Array, "batch length"]) -> Int[Array, "batch length"]:
    """Positions that count from 0 in each document of a packed row."""
    p = jnp.arange(segment_ids.shape[1])[None, :]
    begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    return p - jax.lax.cummax(jnp.where(begins, p, 0), axis=1)


def decode_hidden(
    config: Gpt2Config,
    params: Params,
    input_ids: Int[Array, "batch length"],
    segment_ids: Int[Array, "batch length"] | None = None,
    dropout_key: jax.Array | None = None,
) -> Float[Array, "batch length hidden"]:
    """Hidden states after the final norm. A token sees those before it, and itself.

    segment_ids confine attention to each document of a packed row and restart its positions. They serve for padding
    too: an attention mask of ones and zeros is a row of documents 1 and 0. A dropout_key turns dropout on.
    """
    if segment_ids is None:
        positions = jnp.arange(input_ids.shape[1])[None, :]
        mask = None
    else:
        positions = document_positions(segment_ids)
        mask = (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
    rngs = None if dropout_key is None else {"dropout": dropout_key}
    return Gpt2(config).apply(
        {"params": params}, input_ids, positions, mask, deterministic=dropout_key is None, rngs=rngs
    )[0]


def output_matrix(params: Params) -> Float[Array, "vocab hidden"]:
    """The word embedding, with which hidden states are multiplied to give logits."""
    return params["embeddings"]["word"]["embedding"]


def predict_tokens(
    config: Gpt2Config, params: Params, hidden: Float[Array, "*batch hidden"]
) -> Float[Array, "*batch vocab"]:
    """Vocabulary logits in float32. Training takes objectives.chunked_loss instead, which never holds them all."""
    table = output_matrix(params).astype(config.dtype)
    return jnp.einsum("...h,vh->...v", hidden, table, preferred_element_type=jnp.float32)


class DecodeState(NamedTuple):
    """What generation carries from token to token.

    cache: keys and values of static shape, see `empty_cache`.
    filled: bool [batch, slots], the slots that may be looked at.
    position: int32 [batch], the position of the next token.
    index: int32 scalar, the slot of the next token.
    """

    cache: Any
    filled: Array
    position: Array
    index: Array


def prefill(
    config: Gpt2Config,
    params: Params,
    prompts: Int[Array, "batch length"],
    mask: Bool[Array, "batch length"],
    new_tokens: int,
) -> tuple[Float[Array, "batch vocab"], DecodeState]:
    """Reads prompts padded on the left: logits for the token that follows, and room for `new_tokens` more."""
    batch, length = prompts.shape
    slots = length + new_tokens
    filled = jnp.pad(mask, ((0, 0), (0, new_tokens)))
    positions = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
    causal = jnp.arange(length)[:, None] >= jnp.arange(slots)[None, :]
    hidden, cache = Gpt2(config).apply(
        {"params": params}, prompts, positions, filled[:, None, None, :] & causal,
        cache=empty_cache(config.stack, batch, slots), index=jnp.int32(0),
    )
    state = DecodeState(cache, filled, positions[:, -1] + 1, jnp.int32(length))
    return predict_tokens(config, params, hidden[:, -1]), state


def decode(
    config: Gpt2Config, params: Params, tokens: Int[Array, " batch"], state: DecodeState
) -> tuple[Float[Array, "batch vocab"], DecodeState]:
    """Appends one token to each row: logits for the next one, and the state after it."""
    filled = state.filled.at[:, state.index].set(True)
    hidden, cache = Gpt2(config).apply(
        {"params": params}, tokens[:, None], state.position[:, None], filled[:, None, None, :],
        cache=state.cache, index=state.index,
    )
    state = DecodeState(cache, filled, state.position + 1, state.index + 1)
    return predict_tokens(config, params, hidden[:, 0]), state
