"""Words and their contexts (word2vec, Mikolov et al. 2013, "Distributed Representations of Words and Phrases", section
2), as its C code draws them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32


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


class NoiseTable(NamedTuple):
    """An alias table (Walker 1977): V slots, all equally likely, of which the first `own` / 2³² belongs to the word of
    the same number and the rest to the word `other`. A draw is one number and two lookups, whatever V is."""

    own: UInt32[np.ndarray, " vocab"]
    other: Int[np.ndarray, " vocab"]


def noise_table(counts: Int[np.ndarray, " vocab"], power: float) -> NoiseTable:
    """The table of probabilities proportional to counts to the power, 0 where a count is 0. The slot of each light word
    (one below 1 / V) is topped up by the current heavy word; a heavy word that falls below is topped up by the next."""
    weights = np.where(counts > 0, counts, 0).astype(np.float64) ** power * (counts > 0)
    weights *= len(counts) / weights.sum()
    is_heavy = weights >= 1
    is_heavy[np.argmax(weights)] = True  # also where all are equal and rounding leaves them below 1
    light, heavy = np.flatnonzero(~is_heavy), np.flatnonzero(is_heavy)
    own, other = weights.copy(), np.arange(len(counts))
    missing_before = np.concatenate([[0.0], np.cumsum(1 - weights[light])])
    spare_so_far = np.cumsum(weights[heavy] - 1)
    # The first heavy word that is still above 1 / V when the light words before this one are topped up.
    giver = np.searchsorted(spare_so_far, missing_before[:-1], side="right")
    other[light] = heavy[np.minimum(giver, len(heavy) - 1)]
    # What a heavy word has left when the light words have taken more than it could spare.
    last = np.minimum(np.searchsorted(missing_before, spare_so_far), len(light))
    own[heavy] = 1 + spare_so_far - missing_before[last]
    other[heavy[:-1]] = heavy[1:]
    return NoiseTable(np.clip(own * 2**32, 0, 2**32 - 1).astype(np.uint32), other.astype(np.int32))


def draw_noise(key: jax.Array, table: NoiseTable, shape: tuple[int, ...]) -> Int[Array, "*shape"]:
    """Words drawn with the probabilities of a `noise_table`, to 2⁻³² of each slot (the C code rounds them to 10⁻⁸)."""
    bits = jax.random.bits(key, shape, jnp.uint32)
    slot, place = _long_product(bits, len(table.own))  # bits · V = slot · 2³² + place
    own = place < jnp.asarray(table.own)[slot]
    return jnp.where(own, slot, jnp.asarray(table.other)[slot]).astype(jnp.int32)


def _long_product(a: UInt32[Array, "*shape"], b: int) -> tuple[UInt32[Array, "*shape"], UInt32[Array, "*shape"]]:
    """(a · b) // 2³² and (a · b) mod 2³², by halves of 16 bits. (jax.lax.mulhi does not compile for a mesh.)"""
    a_high, a_low, (b_high, b_low) = a >> 16, a & 0xFFFF, divmod(b, 2**16)
    middle = a_high * b_low + (a_low * b_low >> 16)
    return a_high * b_high + (middle >> 16) + ((a_low * b_high + (middle & 0xFFFF)) >> 16), a * jnp.uint32(b)
