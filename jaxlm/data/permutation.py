"""A pseudo-random permutation of 0..n-1 that is computed at any place, with no list of n numbers.

grain's `MapDataset.shuffle` does the same one index at a time; it is not used because importing it imports jax, and
because a batch wants all its indices at once.
"""

from __future__ import annotations

import numpy as np

_ROUNDS = 6
_SMALL = 1 << 10  # a network over few bits prefers some places; so few are sorted by random numbers instead


def permute(index: np.ndarray, size: int, *key: int) -> np.ndarray:
    """The places of `index` in a pseudo-random permutation of range(size) chosen by `key`.

    index: int [any shape], 0 <= index < size. Returns int64 of the same shape. A Feistel network over the bits that
    `size` needs; what falls outside goes through again until it falls inside (cycle walking: Black and Rogaway,
    "Ciphers with arbitrary finite domains", 2002).
    """
    random = np.random.SeedSequence(list(key))
    if size <= _SMALL:
        return np.argsort(random.generate_state(size, np.uint64), kind="stable")[index]
    bits = (size - 1).bit_length()
    keys = random.generate_state(_ROUNDS, np.uint64)
    value = _network(index.astype(np.uint64), bits, keys)
    while (outside := value >= size).any():
        value[outside] = _network(value[outside], bits, keys)
    return value.astype(np.int64)


def _network(value: np.ndarray, bits: int, keys: np.ndarray) -> np.ndarray:
    """A bijection of the numbers of `bits` bits: each half in turn is changed by a hash of the other."""
    low = np.uint64(bits // 2)
    high_mask, low_mask = np.uint64((1 << (bits - bits // 2)) - 1), np.uint64((1 << (bits // 2)) - 1)
    left, right = value >> low, value & low_mask
    for one, two in zip(keys[::2], keys[1::2], strict=True):
        left = left ^ (_hash(right ^ one) & high_mask)
        right = right ^ (_hash(left ^ two) & low_mask)
    return (left << low) | right


def _hash(value: np.ndarray) -> np.ndarray:
    """Spreads every bit over the low ones (constants of the SplitMix64 generator)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value >> np.uint64(32)
