"""Random bits that are a formula of their index: the same on every mesh, and no array of them need exist."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

Word = UInt32[Array, "..."]


def threefry_bits(
    key: jax.Array, shape: tuple[int, ...], start: int | UInt32[Array, ""] = 0
) -> UInt32[Array, "*shape"]:
    """Random words of a threefry key, counted by (first index, start + index in the rest).

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
    second = index(range(1, len(shape))) + jnp.uint32(start)
    return threefry_2x32((words[0], words[1]), (index(range(1)), second), rounds=13)[0]


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
