"""Parts that the Pallas kernels of attention share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxlm.models.layers.dropout import kept

LANES = 128
"""Lanes of a TPU's vector registers, and the width of its matrix unit."""
VMEM = 64 * 2**20
"""Bytes of vector memory that a kernel may ask for; where a chip has less, the compiler refuses what does not fit."""
HIDDEN = -1e30
"""Score of a key that a query may not attend to: its exp is 0 beside that of any visible key."""


def dot(a: jax.Array, b: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    """Return the product of two matrices in float32, summed over one axis of each."""
    # A TPU's kernel multiplies no bfloat16 by JAX_DEFAULT_MATMUL_PRECISION=highest, which is for float32.
    precision = jax.lax.Precision.DEFAULT if a.dtype == jnp.bfloat16 else None
    dimensions = ((contracted[0],), (contracted[1],)), ((), ())
    return jax.lax.dot_general(a, b, dimensions, precision, jnp.float32)


def as_row(column: Float[Array, "queries 1"]) -> Float[Array, "1 queries"]:
    """Turn a column into a row."""
    return jnp.broadcast_to(column, (column.shape[0], LANES)).T[:1]


def as_column(row: Float[Array, "1 queries"] | Int[Array, "1 queries"]) -> jax.Array:
    """Turn a row into a column."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:, :1]


def kept_elements(
    seed: Int[Array, ""], queries: int | jax.Array, keys: int | jax.Array, shape: tuple[int, int], row: int, rate: float
) -> Bool[Array, "queries keys"]:
    """Return the mask of a block of probabilities that dropout keeps: that of `keep_mask`, of all scores.

    The block begins at `queries` and `keys`, and a query has `row` keys; `seed` is that of the row and head.
    """
    # One addition per element; the rest is of a column and of a row.
    query = jax.lax.broadcasted_iota(jnp.int32, (shape[0], 1), 0) + queries
    key = jax.lax.broadcasted_iota(jnp.int32, (1, shape[1]), 1) + keys
    return kept((query * row + seed) + key, seed, rate)
