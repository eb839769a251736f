"""Parts that the Pallas kernels of attention share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from jaxlm.models.layers.dropout import resolution

LANES = 128
"""Lanes of a TPU's vector registers, and the width of its matrix unit."""
VMEM = 64 * 2**20
"""Bytes of vector memory that a kernel may ask for; where a chip has less, the compiler refuses what does not fit."""
HIDDEN = -1e30
"""Score of a key that a query may not attend to: its exp is 0 beside that of any visible key."""


def dot(a: jax.Array, b: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    """Return the product of two matrices in float32, summed over one axis of each."""
    return jax.lax.dot_general(
        a, b, (((contracted[0],), (contracted[1],)), ((), ())), preferred_element_type=jnp.float32
    )


def as_row(column: Float[Array, "queries 1"]) -> Float[Array, "1 queries"]:
    """Turn a column into a row."""
    return jnp.broadcast_to(column, (column.shape[0], LANES)).T[:1]


def as_column(row: Float[Array, "1 queries"] | Int[Array, "1 queries"]) -> jax.Array:
    """Turn a row into a column."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:, :1]


def kept_elements(
    seed: Int[Array, ""], block: int | Int[Array, ""], shape: tuple[int, int], rate: float
) -> Bool[Array, "rows columns"]:
    """Return the mask of the elements that dropout keeps, from the chip's generator.

    Seed and block decide the bits. A 32-bit word serves 2 or 4 elements, as many rows apart as there are words.
    """
    dtype, threshold, _ = resolution(rate)
    bits = jnp.iinfo(dtype).bits
    pltpu.prng_seed(seed, block)
    words = pltpu.prng_random_bits((shape[0] * bits // 32, shape[1]))
    # An element's bits go to the top of the word; words are signed, so that the least one is -2³¹.
    least = (threshold << (32 - bits)) - 2**31
    return jnp.concatenate([(words << shift) >= least for shift in range(0, 32, bits)], axis=0)
