"""Dropout with cheap random bits."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt32

from jaxlm.models.placement import devices

Word = UInt32[Array, "..."]


def dropout(x: Float[Array, "*shape"], rate: float, key: jax.Array | None) -> Float[Array, "*shape"]:
    """Zeroes each element with probability `rate`, scales the rest by 1 / (1 - rate); the identity without a key.

    The rate is met to within 1/65,536.
    """
    if key is None or rate <= 0.0:
        return x
    threshold = round(rate * 65536)
    if devices().platform == "cpu" and jax.random.key_impl(key) == "threefry2x32":
        keep = threefry_bits(key, x.shape) >= jnp.uint32(threshold << 16)
    else:
        # Sixteen random bits an element instead of 32: two elements share a word, which halves the generator's work.
        words = jax.random.bits(key, (*x.shape[:-1], -(-x.shape[-1] // 2)), jnp.uint32)
        halves = jax.lax.bitcast_convert_type(words, jnp.uint16).reshape(*x.shape[:-1], -1)
        keep = halves[..., : x.shape[-1]] >= jnp.uint16(threshold)
    return jnp.where(keep, x * (1.0 / (1.0 - threshold / 65536)), jnp.zeros((), x.dtype)).astype(x.dtype)


def threefry_bits(key: jax.Array, shape: tuple[int, ...]) -> UInt32[Array, "*shape"]:
    """Random words of a threefry key, counted by (first index, index in the rest).

    On a CPU jax's own generator is a loop over arrays in memory, a tenth of a small model's step. This one is plain
    arithmetic on each element's index, which the compiler puts into the loop that uses the bits. 13 rounds are the
    fewest that pass every statistical test of the paper.
    """
    def index(axes: range) -> jax.Array:
        total = jnp.zeros(shape, jnp.uint32)
        for axis in axes:
            stride = math.prod(shape[axis + 1 : axes.stop]) % 2**32
            total += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(stride)
        return total

    words = jax.random.key_data(key)
    return threefry_2x32((words[0], words[1]), (index(range(1)), index(range(1, len(shape)))), rounds=13)[0]


def threefry_2x32(
    key: tuple[Word, Word], counter: tuple[Word, Word], rounds: int = 20
) -> tuple[Word, Word]:
    """The block cipher behind the bits (Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3", section
    3.3), element by element."""
    keys = (*key, key[0] ^ key[1] ^ np.uint32(0x1BD11BDA))
    first, second = counter[0] + keys[0], counter[1] + keys[1]
    for turn in range(rounds):
        rotation = ((13, 15, 26, 6), (17, 29, 16, 24))[turn // 4 % 2][turn % 4]
        first = first + second
        second = ((second << rotation) | (second >> (32 - rotation))) ^ first
        if turn % 4 == 3:  # the key goes in again, in turn, with the number of times that it did
            times = turn // 4 + 1
            first = first + keys[times % 3]
            second = second + keys[(times + 1) % 3] + np.uint32(times)
    return first, second
