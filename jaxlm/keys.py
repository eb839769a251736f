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


def purpose_key(seed: int, purpose: Purpose) -> jax.Array:
    """Return the key of a seed for one purpose.

    Without it keys of different purposes would coincide, since `split(key)[i]` equals `fold_in(key, i)`.
    """
    return jax.random.fold_in(jax.random.key(seed), purpose)
