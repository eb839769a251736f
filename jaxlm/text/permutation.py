"""A shuffle without a list: a permutation of 0..n-1 that can be asked at any place.

grain's `MapDataset.shuffle` does the same one index at a time; it is not used because importing it imports jax, and
because a batch wants all its indices at once.
"""

from __future__ import annotations

import numpy as np

_ROUNDS = 6
_ODD = np.uint64(0x9E3779B97F4A7C15)


def permute(index: np.ndarray, size: int, *key: int) -> np.ndarray:
    """The places of `index` in a pseudo-random permutation of range(size) chosen by `key`.

    index: int [any shape], 0 <= index < size. Returns int64 of the same shape. A Feistel network over the smallest
    even number of bits that holds `size`; what falls outside goes through again until it falls inside
    (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = np.random.SeedSequence(list(key)).generate_state(_ROUNDS, np.uint64)
    value = _feistel(index.astype(np.uint64), half, keys)
    while (outside := value >= np.uint64(size)).any():
        value[outside] = _feistel(value[outside], half, keys)
    return value.astype(np.int64)


def _feistel(value: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = value >> shift, value & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _mix(value: np.ndarray) -> np.ndarray:
    """Spreads every bit over all the others (the finaliser of the SplitMix64 generator)."""
    value = value + _ODD
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
