"""Dropout with cheap random bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlm.models.layers.placement import devices
from jaxlm.random_bits import threefry_bits


def dropout(x: Float[Array, "*shape"], rate: float, key: jax.Array | None) -> Float[Array, "*shape"]:
    """Zeroes each element with probability `rate`, scales the rest by 1 / (1 - rate); the identity without a key.

    The rate is met to within 1/65,536, and is at most 65,535/65,536.
    """
    if key is None or rate <= 0.0:
        return x
    threshold = min(round(rate * 65536), 65535)
    if devices().platform == "cpu" and jax.random.key_impl(key) == "threefry2x32":
        keep = threefry_bits(key, x.shape) >= jnp.uint32(threshold << 16)
    else:
        # Sixteen random bits an element instead of 32: two elements share a word, which halves the generator's work.
        words = jax.random.bits(key, (*x.shape[:-1], -(-x.shape[-1] // 2)), jnp.uint32)
        halves = jax.lax.bitcast_convert_type(words, jnp.uint16).reshape(*x.shape[:-1], -1)
        keep = halves[..., : x.shape[-1]] >= jnp.uint16(threshold)
    return jnp.where(keep, x * (1.0 / (1.0 - threshold / 65536)), jnp.zeros((), x.dtype)).astype(x.dtype)
