"""Rotary position embeddings (Su et al. 2021, section 3.2).

Elements k and k + head_dim/2 of a head are rotated by position · frequency k, in float32. Attention scores depend on
differences of positions only, so that documents of a packed row need no positions of their own.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Rope:
    """Frequencies of rotary position embeddings: theta^(-2k/head_dim), scaled for longer rows than in training.

    Attributes:
        theta: Base.
        scaling: () for none; (factor,) divides all frequencies (Chen et al. 2023, section 2.3); (factor, low, high,
            length) divides, as in Llama 3.1, those with fewer than `low` turns in `length` positions, keeps those with
            more than `high`, and interpolates linearly between.
    """

    theta: float
    scaling: tuple[float, ...] = ()

    def frequencies(self, head_dim: int) -> Float[np.ndarray, " half"]:
        """Return the angle per position of each pair of elements, float32."""
        f = self.theta ** (-np.arange(head_dim // 2) * 2 / head_dim)
        if len(self.scaling) == 1:
            f = f / self.scaling[0]
        elif self.scaling:
            factor, low, high, length = self.scaling
            kept = np.clip((length * f / (2 * np.pi) - low) / (high - low), 0.0, 1.0)
            f = f * (kept + (1.0 - kept) / factor)
        return f.astype(np.float32)


def rotate(
    x: Float[Array, "batch length heads head_dim"], positions: Int[Array, "#batch length"], rope: Rope
) -> Float[Array, "batch length heads head_dim"]:
    """Return `x` rotated by its positions."""
    cos, sin = (y[..., None, :] for y in _cos_sin(positions, rope, x.shape[-1]))
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def rotation_table(length: int, rope: Rope, head_dim: int, width: int) -> Float[Array, "2 length width"]:
    """Return [cos, ±sin] for `width` columns of heads: rotated x is x · cos + (x with its halves swapped) · ±sin."""
    cos, sin = _cos_sin(jnp.arange(length), rope, head_dim)
    table = jnp.stack([jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)])
    return jnp.tile(table, (1, 1, width // head_dim))


def _cos_sin(positions: Int[Array, "*shape"], rope: Rope, head_dim: int) -> tuple[Float[Array, "*shape half"], ...]:
    angles = positions[..., None] * rope.frequencies(head_dim)
    return jnp.cos(angles), jnp.sin(angles)
