"""Rotary position embeddings (Su et al. 2021, section 3.2).

Elements k and k + head_dim/2 of a head are rotated by position · theta^(-2k/head_dim), in float32. Attention scores
depend on differences of positions only, so that documents of a packed row need no positions of their own.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def rotate(
    x: Float[Array, "batch length heads head_dim"], positions: Int[Array, "#batch length"], theta: float
) -> Float[Array, "batch length heads head_dim"]:
    """Return `x` rotated by its positions."""
    cos, sin = (y[..., None, :] for y in _cos_sin(positions, theta, x.shape[-1]))
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def rotation_table(length: int, theta: float, head_dim: int, width: int) -> Float[Array, "2 length width"]:
    """Return [cos, ±sin] for `width` columns of heads: rotated x is x · cos + (x with its halves swapped) · ±sin."""
    cos, sin = _cos_sin(jnp.arange(length), theta, head_dim)
    table = jnp.stack([jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)])
    return jnp.tile(table, (1, 1, width // head_dim))


def _cos_sin(positions: Int[Array, "*shape"], theta: float, head_dim: int) -> tuple[Float[Array, "*shape half"], ...]:
    frequencies = (theta ** (-np.arange(head_dim // 2) * 2 / head_dim)).astype(np.float32)
    angles = positions[..., None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)
