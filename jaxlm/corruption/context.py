"""Words and their contexts (word2vec, Mikolov et al. 2013, "Distributed Representations of Words and Phrases", section
2), as its C code draws them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

_SLOTS = 2**31 - 1


def keep_probabilities(counts: Int[np.ndarray, " vocab"], threshold: float) -> Float[np.ndarray, " vocab"]:
    """The probability that an occurrence of each word is kept: (√(f / tN) + 1) · tN / f, at most 1, for a word that
    occurs f times among N; 1 where the threshold t is 0. (The paper's √(t / frequency) is another formula.)"""
    if threshold == 0.0:
        return np.ones(len(counts), np.float32)
    ratio = threshold * counts.sum() / np.maximum(counts, 1)
    return np.minimum(1.0, np.sqrt(ratio) + ratio).astype(np.float32)


def subsample(
    key: jax.Array, tokens: Int[Array, "batch length"], keep: Float[Array, "batch length"]
) -> tuple[Int[Array, "batch length"], Int[Array, " batch"]]:
    """(the tokens that are kept, each with its probability, moved together to the left; how many there are). Windows
    over what is left reach further in the text."""
    is_kept = jax.random.uniform(key, tokens.shape) < keep
    order = jnp.argsort(~is_kept, axis=1, stable=True)
    return jnp.take_along_axis(tokens, order, axis=1), jnp.sum(is_kept, axis=1)


def contexts(
    key: jax.Array, tokens: Int[Array, "batch length"], sizes: Int[Array, " batch"], window: int
) -> tuple[Int[Array, "batch length neighbours"], Bool[Array, "batch length neighbours"]]:
    """(the `window` tokens on each side of every token, which of them are in its context). A context reaches 1 to
    `window` tokens to each side, drawn evenly for each token, and never beyond the row's size."""
    rows, length = tokens.shape
    offsets = np.array([offset for offset in range(-window, window + 1) if offset])
    radius = jax.random.randint(key, (rows, length, 1), 1, window + 1)
    centre = np.arange(length)[:, None]
    place = centre + offsets
    inside = (place >= 0) & (place < sizes[:, None, None]) & (centre < sizes[:, None, None])
    return tokens[:, np.clip(place, 0, length - 1)], inside & (np.abs(offsets) <= radius)


def noise_slots(counts: Int[np.ndarray, " vocab"], power: float) -> Int[np.ndarray, " vocab"]:
    """The table that `draw_noise` reads: running sums of counts to the power, as shares of 2³¹ - 1 slots."""
    weights = np.where(counts > 0, counts, 0).astype(np.float64) ** power * (counts > 0)
    return np.round(np.cumsum(weights) / weights.sum() * _SLOTS).astype(np.int32)


def draw_noise(key: jax.Array, slots: Int[Array, " vocab"], shape: tuple[int, ...]) -> Int[Array, "*shape"]:
    """Words drawn with probabilities proportional to counts to the power of `noise_slots`."""
    return jnp.searchsorted(slots, jax.random.randint(key, shape, 0, _SLOTS), side="right").astype(jnp.int32)
