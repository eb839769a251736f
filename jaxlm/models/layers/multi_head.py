"""Multi-head attention with a key/value cache for decoding."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxlm.models.layers.attention import attend, repeat_heads
from jaxlm.models.layers.banded import in_band
from jaxlm.models.layers.config import StackConfig, kernel_init
from jaxlm.models.layers.dense import Dense, add_bias, dense_product
from jaxlm.models.layers.disentangled import attend_disentangled
from jaxlm.models.layers.dropout import dropout, module_key
from jaxlm.models.layers.kernel_choice import Attention, choose_kernel
from jaxlm.models.layers.norm import Norm
from jaxlm.models.layers.rotary import rotate

Cache = dict[str, jax.Array]
"""Key/value cache: {"key", "value"}, each [batch, slots, key/value heads, head_dim]."""


class Visibility(NamedTuple):
    """Masks and bias of one attention; the fields are arguments of `attend`."""

    query_segments: Int[Array, "batch queries"] | None = None
    key_segments: Int[Array, "batch keys"] | None = None
    lengths: Int[Array, " batch"] | None = None
    mask: Bool[Array, "#batch #heads #queries keys"] | None = None
    bias: Float[Array, "#batch #heads queries keys"] | None = None

    def at_queries(self, positions: Int[Array, "batch selected"]) -> Visibility:
        """Return the visibility of the queries at some positions of each row."""
        def rows(x: jax.Array | None) -> jax.Array | None:
            is_shared = x is None or x.shape[2] == 1
            return x if is_shared else jnp.take_along_axis(x, positions[:, None, :, None], axis=2)

        of, own = self.query_segments, self._replace(mask=rows(self.mask), bias=rows(self.bias))
        return own if of is None else own._replace(query_segments=jnp.take_along_axis(of, positions, axis=1))


FULL_VISIBILITY = Visibility()


class MultiHeadAttention(nn.Module):
    """Multi-head attention of `x` over itself, or over `source`.

    With a cache, new keys and values are written to the slots from `index` on, and attention is over all slots; the
    caller masks the empty ones. Cross-attention (`cross`) fills the cache if it gets a source, and reads it otherwise.
    """

    config: StackConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch queries hidden"],
        source: Float[Array, "batch keys hidden"] | None = None,
        *,
        visibility: Visibility = FULL_VISIBILITY,
        causal: bool = False,
        cache: Cache | None = None,
        index: Any = None,
        cross: bool = False,
        deterministic: bool = True,
        with_scores: bool = False,
        positions: Int[Array, "batch queries"] | None = None,
        distances: Float[Array, "distances hidden"] | None = None,
    ) -> tuple[Float[Array, "batch queries hidden"], Cache | Float[Array, "batch heads queries keys"] | None]:
        """Return the output, and the updated cache, or with `with_scores` the scores, or None.

        Scores are scale · q kᵀ in float32, before masks, bias and softmax. With the vectors of relative `distances`
        (see `disentangled.RelativeTable`) attention is disentangled; `positions` are those of the queries in `source`.
        """
        c = self.config
        source = x if source is None and not cross else source
        decoding = cache is not None
        if c.band is not None and decoding:  # slots are positions
            band = in_band(x.shape[1], cache["key"].shape[1], c.band, index)
            visibility = visibility._replace(mask=visibility.mask & band)
        dropout_key = module_key(self, c.attention_dropout, deterministic)
        project = functools.cache(lambda name: HeadsDense(c, query=name == "query", name=name))
        query = _head_norm(c, "query_norm")(project("query")(x))
        # Cached keys and collected scores are of rotated vectors; `attend` rotates consecutive positions only.
        is_rotated = decoding or with_scores or positions is not None
        if source is None:
            key, value = cache["key"], cache["value"]
        else:
            key, value = _head_norm(c, "key_norm")(project("key")(source)), project("value")(source)
            if c.rope is not None and is_rotated:
                own = (0 if index is None else index) + jnp.arange(source.shape[1])[None, :]  # slots are positions
                key = rotate(key, own, c.rope)
                query = rotate(query, own if positions is None else positions, c.rope)
            if decoding and not cross:
                key, value = (_write(cache[name], new, index) for name, new in (("key", key), ("value", value)))
        extra = {"key": key, "value": value} if decoding else None
        if with_scores:
            keys = repeat_heads(key, c.num_heads)
            extra = jnp.einsum("bqhk,bshk->bhqs", query, keys, preferred_element_type=jnp.float32) * c.attention_scale
        if distances is None:
            rope = None if is_rotated else c.rope
            y = _attend(c, query, key, value, visibility, causal, decoding, dropout_key, rope)
        else:
            distances = dropout(distances, c.dropout, module_key(self, c.dropout, deterministic))
            both = (project(name)(distances[None])[0] for name in ("query", "key"))
            y = attend_disentangled(
                c, query, key, value, *both, positions, query_segments=visibility.query_segments,
                key_segments=visibility.key_segments, mask=visibility.mask, dropout_key=dropout_key,
            )
        init = kernel_init(c, residual=True)
        out = Dense(c.hidden_size, c.has_bias("out"), c.dtype, init, name="out")
        return out(y.reshape(*x.shape[:-1], -1)), extra


def _head_norm(config: StackConfig, name: str) -> Callable[[jax.Array], jax.Array]:
    """Return the norm over each head's queries or keys, or the identity."""
    norm = Norm("rms", config.norm_eps, config.dtype, offset=config.norm_offset, name=name)
    return norm if config.has_query_norm else lambda x: x


def _attend(config, query, key, value, visibility, causal, decoding, dropout_key, rope):
    """Return attention by the kernel for these sizes; where tokens are decoded, the mask has the band in it."""
    mask, bias = (None if x is None else x.shape for x in (visibility.mask, visibility.bias))
    kernel = "xla" if decoding else choose_kernel(config.attention, Attention(
        query.shape[1], key.shape[1], config.num_heads, config.head_dim, config.dtype,
        drops=dropout_key is not None, mask=mask, bias=bias, causal=causal,
        packed=visibility.query_segments is not None, band=config.band,
        has_lengths=visibility.key_segments is None or visibility.lengths is not None,
    ))
    return attend(
        query, key, value, **visibility._asdict(), causal=causal, band=None if decoding else config.band,
        rope=rope, scale=config.attention_scale, dropout_rate=config.attention_dropout,
        dropout_key=dropout_key, kernel=kernel,
    )


def _write(slots, new, index):
    """Return a key or value cache with new vectors in the slots from `index` on."""
    return jax.lax.dynamic_update_slice_in_dim(slots, new.astype(slots.dtype), index, 1)


class HeadsDense(nn.Module):
    """Dense layer to [batch, length, heads, head_dim], or with `heads_first` to [batch, heads, length, head_dim].

    Keys and values have the key/value heads of the configuration.

    Parameters: `kernel` [in, heads · head_dim] and `bias`, as of a plain dense layer; with `heads_first` no bias.
    """

    config: StackConfig
    query: bool = False
    heads_first: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "batch length hidden"]) -> jax.Array:
        c = self.config
        shape = (c.num_heads if self.query else c.kv_heads, c.head_dim)
        kernel = self.param("kernel", kernel_init(c, query=self.query), (x.shape[-1], math.prod(shape)), jnp.float32)
        x, kernel = x.astype(c.dtype), kernel.astype(c.dtype)
        if self.heads_first:
            return jnp.einsum("bli,ihk->bhlk", x, kernel.reshape(-1, *shape))
        y = dense_product(x, kernel)
        if c.has_bias(self.name):
            y = add_bias(y, self.param("bias", nn.initializers.zeros, (math.prod(shape),), jnp.float32))
        return y.reshape(*x.shape[:-1], *shape)


def empty_cache(config: StackConfig, batch: int, slots: int, source_length: int = 0) -> list[dict[str, Cache]]:
    """Return empty caches, one per layer: self-attention over `slots`, cross-attention over `source_length`."""

    def pair(length: int) -> Cache:
        shape = (batch, length, config.kv_heads, config.head_dim)
        return {"key": jnp.zeros(shape, config.dtype), "value": jnp.zeros(shape, config.dtype)}

    cross = {"cross": pair(source_length)} if config.cross_attention else {}
    return [{"self": pair(slots)} | cross for _ in range(config.num_layers)]
