"""Noise words of a sampled softmax: drawn log-uniformly by rank, without replacement, as TensorFlow's sampler does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def log_uniform(size: int) -> Float[np.ndarray, " size"]:
    """Probability of each rank r from 0: log((r + 2) / (r + 1)) / log(size + 1), near Zipf's law."""
    ranks = np.arange(size, dtype=np.float64)
    return np.log((ranks + 2) / (ranks + 1)) / np.log(size + 1)


def draw_words(key: jax.Array, shares: Float[Array, " vocab"], count: int) -> Int[Array, " count"]:
    """`count` different ids, drawn one after another by their shares: the largest of log share + Gumbel noise."""
    return jax.lax.top_k(jnp.log(shares) + jax.random.gumbel(key, shares.shape), count)[1]


def expected_counts(shares: Float[np.ndarray, " vocab"], count: int) -> Float[np.ndarray, " vocab"]:
    """The probability that each id is among `count` different ones, 1 - (1 - share)ᵗ, with the number of tries t at
    which these add up to `count` (TensorFlow takes the tries that a draw happened to need)."""
    low, high = float(count), 2.0 * count
    log_rest = np.log1p(-shares)

    def expected(tries: float) -> np.ndarray:
        return -np.expm1(tries * log_rest)

    while expected(high).sum() < count:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected(middle).sum() < count else (low, middle)
    return expected(high)
