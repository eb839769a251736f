"""Multi-head attention: projections around `attend`, with a cache for decoding."""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxlm.models.layers.attention import attend
from jaxlm.models.layers.config import StackConfig, kernel_init
from jaxlm.models.layers.dropout import module_key

Cache = dict[str, jax.Array]
"""{"key", "value"}: [batch, slots, heads, head_dim]."""


class Visibility(NamedTuple):
    """What the queries of an attention may see; the fields are those of `attend`."""

    query_segments: Int[Array, "batch queries"] | None = None
    key_segments: Int[Array, "batch keys"] | None = None
    mask: Bool[Array, "#batch #heads #queries keys"] | None = None
    bias: Float[Array, "#batch #heads queries keys"] | None = None


EVERYTHING = Visibility()


class MultiHeadAttention(nn.Module):
    """Attention of x over itself, or over `source`.

    With a cache, the new keys and values go to slots index..index + queries - 1 and attention is over all slots; the
    caller's mask says which slots are filled. For cross-attention, a cache with a source is filled, and one without is
    read.
    """

    config: StackConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch queries hidden"],
        source: Float[Array, "batch keys hidden"] | None = None,
        *,
        visibility: Visibility = EVERYTHING,
        causal: bool = False,
        cache: Cache | None = None,
        index: Any = None,
        cross: bool = False,
        deterministic: bool = True,
    ) -> tuple[Float[Array, "batch queries hidden"], Cache | None]:
        """Returns the output and the updated cache (None without one)."""
        c = self.config

        def project(name: str, inputs: jax.Array) -> jax.Array:
            init = kernel_init(c, query=name == "query")
            width = c.num_heads * c.head_dim
            y = nn.Dense(width, use_bias=c.use_bias, dtype=c.dtype, name=name, kernel_init=init)(inputs)
            return y.reshape(*inputs.shape[:-1], c.num_heads, c.head_dim)

        query = project("query", x)
        if cross and source is None:
            assert cache is not None
            key, value = cache["key"], cache["value"]
        else:
            source = x if source is None else source
            key, value = project("key", source), project("value", source)
            if cache is not None and not cross:
                key, value = (
                    jax.lax.dynamic_update_slice_in_dim(cache[name], new.astype(cache[name].dtype), index, 1)
                    for name, new in (("key", key), ("value", value))
                )
            cache = None if cache is None else {"key": key, "value": value}
        y = attend(
            query, key, value, **visibility._asdict(), causal=causal, scale=c.attention_scale,
            dropout_rate=c.attention_dropout, dropout_key=module_key(self, c.attention_dropout, deterministic),
            implementation=c.attention,
        )
        out = nn.Dense(
            c.hidden_size, use_bias=c.use_bias, dtype=c.dtype, name="out", kernel_init=kernel_init(c, residual=True)
        )
        return out(y.reshape(*x.shape[:-1], -1)), cache


def empty_cache(config: StackConfig, batch: int, slots: int, source_length: int = 0) -> list[dict[str, Cache]]:
    """Zeroed caches of all layers: self-attention over `slots`, cross-attention over `source_length`."""

    def pair(length: int) -> Cache:
        shape = (batch, length, config.num_heads, config.head_dim)
        return {"key": jnp.zeros(shape, config.dtype), "value": jnp.zeros(shape, config.dtype)}

    cross = {"cross": pair(source_length)} if config.cross_attention else {}
    return [{"self": pair(slots)} | cross for _ in range(config.num_layers)]
