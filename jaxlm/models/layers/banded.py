"""Attention within a band, in blocks of consecutive queries with the keys that they may see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

BLOCK = 128
"""Queries of a block, unless the band is wider, or less than half as wide: fused kernels compute tiles of 64 or 128."""
# Copies of the keys and values are made again in the backward pass, everything else is kept.
_COPIES = ("concatenate", "pad", "slice", "reshape", "squeeze")


def banded_attention(
    attend: Callable[..., jax.Array],
    query: Float[Array, "batch length heads head_dim"],
    key: Float[Array, "batch length heads head_dim"],
    value: Float[Array, "batch length heads head_dim"],
    query_segments: Int[Array, "batch length"] | None, key_segments: Int[Array, "batch length"] | None,
    *, band: int, causal: bool,
) -> Float[Array, "batch length heads head_dim"]:
    """Return attention to the keys that are less than `band` positions from their query.

    Each block of queries is a row of its own, with the keys of the block and of its neighbours as far as the band
    reaches: the scores of a row are length x (block + 2 reaches) instead of length². The arguments are those of
    `attention.attend`, which computes the blocks with their `mask`: `attend`, with all that is not given here.
    """
    (batch, length), (block, reach) = query.shape[:2], _block_and_reach(band)

    def blocks(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, -length % block), *[(0, 0)] * (x.ndim - 2)))
        return x.reshape(batch, -1, block, *x.shape[2:])

    def windows(x: jax.Array) -> jax.Array:
        x, rest = blocks(x), [(0, 0)] * (x.ndim - 1)
        before = jnp.pad(x[:, :-1, block - reach :], ((0, 0), (1, 0), *rest))
        after = jnp.pad(x[:, 1:, : 0 if causal else reach], ((0, 0), (0, 1), *rest))
        return jnp.concatenate([before, x, after], axis=2)

    def run(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
        query, key, value = (x.reshape(-1, *x.shape[2:]) for x in (blocks(query), windows(key), windows(value)))
        return attend(query, key, value, mask=mask).reshape(batch, -1, *query.shape[2:])[:, :length]

    # Beyond its ends a row has padding.
    keys = windows(jnp.ones((batch, length), jnp.int32) if key_segments is None else key_segments)[:, :, None]
    visible = keys > 0 if query_segments is None else blocks(query_segments)[..., None] == keys
    mask = visible & in_band(block, keys.shape[-1], band, reach)[0]
    if causal:
        mask &= jnp.tri(block, keys.shape[-1], reach, dtype=bool)
    # The policy does not apply to the mask, which all layers share.
    run = jax.checkpoint(run, policy=lambda primitive, *_, **__: primitive.name not in _COPIES)
    return run(query, key, value, mask.reshape(-1, 1, *mask.shape[2:]))


def in_band(queries: int, keys: int, band: int, first: Any = 0) -> Bool[Array, "1 1 queries keys"]:
    """Return the mask of keys that are less than `band` positions from their query.

    `first` is the position of the first query.
    """
    return (jnp.abs(first + jnp.arange(queries)[:, None] - jnp.arange(keys)[None, :]) < band)[None, None]


def block_shape(queries: int, keys: int, band: int | None, causal: bool) -> tuple[int, int] | None:
    """Return the numbers of queries and keys of a block; None where blocks would not halve the scores."""
    if band is None or queries != keys:
        return None
    block, reach = _block_and_reach(band)
    window = block + reach * (1 if causal else 2)
    return (block, window) if 2 * window <= keys else None


def _block_and_reach(band: int) -> tuple[int, int]:
    """Return the number of queries in a block, and that of the keys which it may see in a neighbour."""
    reach = -(-max(band - 1, 1) // 16) * 16
    return max(reach, min(2 * reach, BLOCK)), reach
