"""T5 1.0 (Raffel et al. 2019) and 1.1: an encoder-decoder with relative position buckets, RMSNorm and no biases."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxlm.errors import UserError
from jaxlm.fields import field
from jaxlm.models.layers.dropout import dropout
from jaxlm.models.layers.stack import (
    Activation,
    AttentionKind,
    DType,
    RematPolicy,
    Stack,
    StackConfig,
    empty_cache,
)

Params = dict[str, Any]
Cache = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class T5Config:
    """A T5 encoder-decoder. The defaults are t5-base (1.0)."""

    vocab_size: int = 32128
    """Rows of the embedding; a run sets it from its tokenizer, rounded up to a multiple of 128."""
    hidden_size: int = 768
    """Width of the residual stream (d_model)."""
    num_layers: int = 12
    """Layers of the encoder, and of the decoder unless num_decoder_layers says otherwise."""
    num_decoder_layers: int | None = None
    """Layers of the decoder; as many as the encoder has when not given."""
    num_heads: int = 12
    """Attention heads of head_dim each; their product need not be hidden_size."""
    head_dim: int = 64
    """Width of one head (d_kv)."""
    intermediate_size: int = 3072
    """Width of the feed-forward layer (d_ff)."""
    activation: Activation = "relu"
    """relu in 1.0, gated-gelu (tanh approximation) in 1.1."""
    tied_head: bool = True
    """Use the embedding as output matrix too (1.0); 1.1 has a matrix of its own."""
    scaled_head: bool = True
    """Multiply the decoder's output by hidden_size^-1/2 before the output matrix, as 1.0 does."""
    relative_buckets: int = 32
    """Buckets of relative distance; each stack has one table of buckets by heads, shared by its layers."""
    relative_max_distance: int = 128
    """Distance from which all keys share a bucket."""
    dropout: float = field(0.1, recipe=True)
    """Dropout after the embeddings, inside the feed-forward layers, on each sublayer and on each stack's output."""
    attention_dropout: float = field(0.1, recipe=True)
    """Dropout on attention probabilities; above 0 it rules out fused attention kernels while training.
    Transformers has one rate for both, so an export says `dropout`."""
    norm_eps: float = 1e-6
    """Epsilon of RMSNorm."""
    dtype: DType = field("float32", recipe=True)
    """Compute type; parameters and the softmax stay in float32."""
    remat: RematPolicy = field("none", resumable=True)
    """What the backward pass recomputes: none, dots (keeps matrix products), full (keeps layer inputs)."""
    attention: AttentionKind = field("auto", resumable=True)
    """Attention kernel: auto takes cuDNN's fused one on GPUs that have it, XLA's elsewhere."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "head_dim", "intermediate_size"):
            if getattr(self, name) < 1:
                raise UserError(f"objective.model.{name} is {getattr(self, name)}; it must be at least 1.")
        if self.num_decoder_layers is not None and self.num_decoder_layers < 1:
            raise UserError(f"objective.model.num_decoder_layers is {self.num_decoder_layers}; it must be at least 1.")
        for name in ("dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise UserError(f"objective.model.{name} is {getattr(self, name)}; it must be in [0, 1).")
        if not 0.0 < self.norm_eps < math.inf:
            raise UserError(f"objective.model.norm_eps is {self.norm_eps}; it must be above 0, and finite.")
        if self.scaled_head and not self.tied_head:  # Transformers' T5 has no such model
            raise UserError(
                "objective.model.scaled_head goes with tied_head only (T5 1.0 has both, 1.1 neither); set it to False."
            )
        if self.relative_buckets < 4 or self.relative_buckets % 4:
            raise UserError(
                f"objective.model.relative_buckets is {self.relative_buckets}; it must be a multiple of 4 (half for "
                "each direction, half of those for exact distances)."
            )
        if self.relative_max_distance <= self.relative_buckets // 2:
            raise UserError(
                f"objective.model.relative_max_distance is {self.relative_max_distance}; it must be above half of "
                f"relative_buckets, {self.relative_buckets // 2}."
            )

    @classmethod
    def published(cls, size: str, **changes: Any) -> T5Config:
        """A published size by name: small, base, large, 3b, 11b; 1.1-small, 1.1-base, 1.1-large, 1.1-xl, 1.1-xxl."""
        hidden, heads, head_dim, intermediate, layers = PUBLISHED[size]
        shape = dict(
            hidden_size=hidden, num_heads=heads, head_dim=head_dim, intermediate_size=intermediate, num_layers=layers
        )
        if size.startswith("1.1-"):  # pretrained without dropout
            shape |= dict(activation="gated-gelu", tied_head=False, scaled_head=False)
            shape |= dict(dropout=0.0, attention_dropout=0.0)
        return cls(**(shape | changes))

    @property
    def decoder_layers(self) -> int:
        return self.num_layers if self.num_decoder_layers is None else self.num_decoder_layers

    @property
    def encoder_stack(self) -> StackConfig:
        return StackConfig(
            hidden_size=self.hidden_size, num_layers=self.num_layers, num_heads=self.num_heads,
            head_dim=self.head_dim, intermediate_size=self.intermediate_size, activation=self.activation,
            norm="rms", norm_placement="pre", norm_eps=self.norm_eps, final_norm=True, use_bias=False,
            scale_attention=False, dropout=self.dropout, attention_dropout=self.attention_dropout,
            intermediate_dropout=self.dropout, init="fan_in", dtype=self.dtype, remat=self.remat,
            attention=self.attention,
        )

    @property
    def decoder_stack(self) -> StackConfig:
        return dataclasses.replace(
            self.encoder_stack, num_layers=self.decoder_layers, causal=True, cross_attention=True
        )


# hidden, heads, head_dim, intermediate, layers of each stack
PUBLISHED = {
    "small": (512, 8, 64, 2048, 6), "base": (768, 12, 64, 3072, 12), "large": (1024, 16, 64, 4096, 24),
    "3b": (1024, 32, 128, 16384, 24), "11b": (1024, 128, 128, 65536, 24),
    "1.1-small": (512, 6, 64, 1024, 8), "1.1-base": (768, 12, 64, 2048, 12), "1.1-large": (1024, 16, 64, 2816, 24),
    "1.1-xl": (2048, 32, 64, 5120, 24), "1.1-xxl": (4096, 64, 64, 10240, 24),
}


def relative_buckets(
    distance: Int[np.ndarray, "*shape"], bidirectional: bool, buckets: int = 32, max_distance: int = 128
) -> Int[np.ndarray, "*shape"]:
    """Bucket of `distance` = key position - query position (T5, section 2.1): small distances have one each, larger
    ones share them on a logarithmic scale up to max_distance.

    Bidirectional gives half of the buckets to keys on the right; otherwise all of those are in bucket 0.
    """
    if bidirectional:
        buckets //= 2
        offset, distance = buckets * (distance > 0), np.abs(distance)
    else:
        offset, distance = 0, np.maximum(-distance, 0)
    exact = buckets // 2
    share = np.log(np.maximum(distance, 1) / exact) / math.log(max_distance / exact)
    # The small constant keeps a distance exactly on a boundary on its upper side, however the logarithm rounds.
    far = np.minimum(exact + np.floor(share * (buckets - exact) + 1e-9), buckets - 1)
    return (offset + np.where(distance < exact, distance, far)).astype(np.int32)


class RelativeBias(nn.Module):
    """One table [buckets, heads] that biases attention scores by distance, shared by the layers of a stack."""

    config: T5Config
    bidirectional: bool

    def setup(self) -> None:
        c = self.config
        init = nn.initializers.normal(c.hidden_size**-0.5)
        self.embedding = self.param("embedding", init, (c.relative_buckets, c.num_heads), jnp.float32)

    def buckets(self, distance: np.ndarray) -> np.ndarray:
        c = self.config
        return relative_buckets(distance, self.bidirectional, c.relative_buckets, c.relative_max_distance)

    def __call__(self, queries: int, keys: int) -> Float[Array, "1 heads queries keys"]:
        """The bias depends on the distance alone: look up each distance once and lay the values out along diagonals,
        with reshapes only, since a gather of queries x keys entries has a slow scatter for its gradient."""
        one_hot = jax.nn.one_hot(self.buckets(np.arange(1 - queries, keys)), self.config.relative_buckets)
        # Exact products: the rounding that TPUs apply to float32 by default would change the table's values.
        by_distance = jnp.einsum("db,bh->hd", one_hot, self.embedding, precision="highest")
        heads, width = self.config.num_heads, queries + keys
        padded = jnp.pad(by_distance, ((0, 0), (0, 1)))
        rows = jnp.broadcast_to(padded[:, None, :], (heads, queries, width)).reshape(heads, queries * width)
        # Read in rows shorter by one, each row starts one entry earlier: column j of row i is distance j - i - q + 1.
        shifted = rows[:, : queries * (width - 1)].reshape(heads, queries, width - 1)
        return shifted[None, :, :, queries - 1 :]

    def at(self, index: Int[Array, ""], slots: int) -> Float[Array, "1 heads 1 slots"]:
        """The bias of one query at position `index` over cache slots 0..slots-1."""
        by_distance = jnp.asarray(self.buckets(-np.arange(slots)))
        buckets = by_distance[jnp.clip(index - jnp.arange(slots), 0, slots - 1)]
        return self.embedding[buckets].T[None, :, None, :]


class T5(nn.Module):
    """Embedding, two stacks with their bias tables, and the head, under the names that checkpoints and exports use."""

    config: T5Config

    def setup(self) -> None:
        c = self.config
        self.shared = nn.Embed(c.vocab_size, c.hidden_size, dtype=c.dtype, embedding_init=nn.initializers.normal(1.0))
        self.encoder_bias = RelativeBias(c, bidirectional=True)
        self.decoder_bias = RelativeBias(c, bidirectional=False)
        self.encoder = Stack(c.encoder_stack)
        self.decoder = Stack(c.decoder_stack)
        if not c.tied_head:
            self.lm_head = LanguageModelHead(c)

    def _dropout(self, x, deterministic):
        return dropout(x, self.config.dropout, None if deterministic else self.make_rng("dropout"))

    def encode(self, input_ids, attention_mask, deterministic=True):
        length = input_ids.shape[1]
        x = self._dropout(self.shared(input_ids), deterministic)
        mask = _key_mask(attention_mask)
        x, _ = self.encoder(x, mask=mask, bias=self.encoder_bias(length, length), deterministic=deterministic)
        return self._dropout(x, deterministic)

    def decode(self, decoder_input_ids, memory, memory_mask, deterministic=True):
        length = decoder_input_ids.shape[1]
        x = self._dropout(self.shared(decoder_input_ids), deterministic)
        x, _ = self.decoder(
            x, bias=self.decoder_bias(length, length), memory=memory, memory_mask=_key_mask(memory_mask),
            deterministic=deterministic,
        )
        return self._dropout(x, deterministic)

    def decode_step(self, ids, cache, index, memory, memory_mask):
        slots = cache["self"]["key"].shape[2]
        x, cache = self.decoder(
            self.shared(ids), mask=(jnp.arange(slots) <= index)[None, None, None, :],
            bias=self.decoder_bias.at(index, slots), memory=memory, memory_mask=_key_mask(memory_mask), cache=cache,
            index=index,
        )
        return self.logits(x)[:, 0], cache

    def head(self):
        """The output matrix, vocabulary first."""
        return self.shared.embedding if self.config.tied_head else self.lm_head().T

    def logits(self, hidden):
        table = self.head().astype(self.config.dtype)
        return jnp.einsum("...h,vh->...v", head_input(self.config, hidden), table, preferred_element_type=jnp.float32)

    def __call__(self, input_ids, decoder_input_ids):
        return self.logits(self.decode(decoder_input_ids, self.encode(input_ids, None), None))


class LanguageModelHead(nn.Module):
    """The kernel [hidden, vocab] of an output layer without bias."""

    config: T5Config

    @nn.compact
    def __call__(self):
        init = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
        return self.param("kernel", init, (self.config.hidden_size, self.config.vocab_size), jnp.float32)


def _key_mask(mask):
    return None if mask is None else mask[:, None, None, :].astype(bool)


def init(config: T5Config, key: jax.Array) -> Params:
    """Fresh parameters, float32: embedding N(0, 1), matrices N(0, 1/fan_in), the query also divided by √head_dim."""
    ids = jnp.zeros((1, 2), jnp.int32)
    return T5(config).init({"params": key}, ids, ids)["params"]


def encode(
    config: T5Config,
    params: Params,
    input_ids: Int[Array, "batch length"],
    attention_mask: Int[Array, "batch length"] | Bool[Array, "batch length"] | None = None,
    dropout_key: jax.Array | None = None,
) -> Float[Array, "batch length hidden"]:
    """The encoder's output. attention_mask is 1 at tokens and 0 at padding; a dropout_key turns dropout on."""
    rngs = None if dropout_key is None else {"dropout": dropout_key}
    return T5(config).apply(
        {"params": params}, input_ids, attention_mask, dropout_key is None, rngs=rngs, method="encode"
    )


def decode(
    config: T5Config,
    params: Params,
    decoder_input_ids: Int[Array, "batch targets"],
    memory: Float[Array, "batch length hidden"],
    memory_mask: Int[Array, "batch length"] | Bool[Array, "batch length"] | None = None,
    dropout_key: jax.Array | None = None,
) -> Float[Array, "batch targets hidden"]:
    """The decoder's output for targets shifted right, over the encoder's `memory`. Padding must stand at the end."""
    rngs = None if dropout_key is None else {"dropout": dropout_key}
    return T5(config).apply(
        {"params": params}, decoder_input_ids, memory, memory_mask, dropout_key is None, rngs=rngs, method="decode"
    )


def head_input(config: T5Config, hidden: Float[Array, "*batch hidden"]) -> Float[Array, "*batch hidden"]:
    """The decoder's output as the output matrix takes it: scaled down where that is the embedding, which has unit
    variance."""
    return hidden * jnp.asarray(config.hidden_size**-0.5, hidden.dtype) if config.scaled_head else hidden


def output_matrix(config: T5Config, params: Params) -> Float[Array, "vocab hidden"]:
    """The matrix that `head_input` is multiplied with to give logits."""
    return T5(config).apply({"params": params}, method="head")


def logits(
    config: T5Config, params: Params, hidden: Float[Array, "batch targets hidden"]
) -> Float[Array, "batch targets vocab"]:
    """Vocabulary logits in float32 of the decoder's output. Training takes objectives.chunked_loss instead."""
    return T5(config).apply({"params": params}, hidden, method="logits")


def decode_step(
    config: T5Config,
    params: Params,
    ids: Int[Array, "batch 1"],
    cache: Cache,
    index: Int[Array, ""],
    memory_mask: Int[Array, "batch length"] | Bool[Array, "batch length"] | None,
    memory: Float[Array, "batch length hidden"] | None = None,
) -> tuple[Float[Array, "batch vocab"], Cache]:
    """Logits after one more token at position `index`, and the cache with it.

    The first step is given `memory`, from which it fills the cache of cross-attention; later steps only read that.
    """
    return T5(config).apply({"params": params}, ids, cache, index, memory, memory_mask, method="decode_step")


def new_cache(config: T5Config, batch: int, slots: int, memory_length: int) -> Cache:
    """An empty cache for `decode_step`: `slots` tokens to come, over `memory_length` encoder states."""
    return empty_cache(config.decoder_stack, batch, slots, memory_length)
