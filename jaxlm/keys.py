"""Random keys: each purpose of a run has keys of its own."""

from __future__ import annotations

import enum

import jax


class Purpose(enum.IntEnum):
    """What a run draws random numbers for."""

    INITIALIZATION = 0
    CORRUPTION = 1
    DROPOUT = 2
    EVALUATION = 3
    GENERATION = 4


def purpose_key(seed: int, purpose: Purpose, impl: str = "threefry2x32") -> jax.Array:
    """Return the key of a seed for one purpose.

    `split(key)[i]` is `fold_in(key, i)`, so that keys derived in different ways from the same seed would coincide.
    """
    return jax.random.fold_in(jax.random.key(seed, impl=impl), purpose)
