"""Context windows and noise words of word2vec (Mikolov et al. 2013, "Distributed Representations", section 2).

Subsampling, windows and noise follow the released C code where it differs from the paper.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32


def keep_probabilities(counts: Int[np.ndarray, " vocab"], threshold: float) -> Float[np.ndarray, " vocab"]:
    """Return the probability that subsampling keeps an occurrence of each word.

    The probability is min(1, (√(f / tN) + 1) · tN / f) for a word that occurs f times among N tokens at threshold t, as
    in the C code; the paper's √(t / frequency) is another formula. A threshold of 0 keeps every word.
    """
    if threshold == 0.0:
        return np.ones(len(counts), np.float32)
    ratio = threshold * counts.sum() / np.maximum(counts, 1)
    return np.minimum(1.0, np.sqrt(ratio) + ratio).astype(np.float32)


def subsample(
    key: jax.Array, tokens: Int[Array, "batch length"], keep: Float[Array, "batch length"]
) -> tuple[Int[Array, "batch length"], Int[Array, " batch"]]:
    """Keep each token with its probability `keep` and move the kept tokens to the left.

    Context windows over the result reach further in the original text, as in the C code.

    Returns:
        The subsampled rows and the number of tokens kept in each.
    """
    is_kept = jax.random.uniform(key, tokens.shape) < keep
    order = jnp.argsort(~is_kept, axis=1, stable=True)
    return jnp.take_along_axis(tokens, order, axis=1), jnp.sum(is_kept, axis=1)


def sample_contexts(
    key: jax.Array, tokens: Int[Array, "batch length"], sizes: Int[Array, " batch"], window: int
) -> tuple[Int[Array, "batch length neighbours"], Bool[Array, "batch length neighbours"]]:
    """Return the neighbours of every token and a mask of those in its context.

    A context reaches to both sides by a radius drawn uniformly from 1 to `window` for each token, and ends with the
    row.

    The text is read after subsampling; `window` is the largest radius.

    Returns:
        The `window` tokens on each side of every token, and which of them belong to its context.
    """
    rows, length = tokens.shape
    offsets = np.array([offset for offset in range(-window, window + 1) if offset])
    radius = jax.random.randint(key, (rows, length, 1), 1, window + 1)
    centre = np.arange(length)[:, None]
    position = centre + offsets
    is_inside = (position >= 0) & (position < sizes[:, None, None]) & (centre < sizes[:, None, None])
    return tokens[:, np.clip(position, 0, length - 1)], is_inside & (np.abs(offsets) <= radius)


class NoiseTable(NamedTuple):
    """Alias table of a discrete distribution (Walker 1977).

    All V slots are equally likely. Slot i belongs to word i with probability `probability[i]` / 2³² and to word
    `alias[i]` otherwise, so that a draw takes one random number and two look-ups for any V.
    """

    probability: UInt32[np.ndarray, " vocab"]
    alias: Int[np.ndarray, " vocab"]


def noise_table(counts: Int[np.ndarray, " vocab"], power: float) -> NoiseTable:
    """Build the alias table of probabilities proportional to counts ** power; words that do not occur get 0.

    Each light word (below 1 / V) is topped up by the current heavy word. A heavy word that falls below 1 / V is topped
    up by the next heavy word.
    """
    weights = np.where(counts > 0, counts, 0).astype(np.float64) ** power * (counts > 0)
    weights *= len(counts) / weights.sum()
    is_heavy = weights >= 1
    is_heavy[np.argmax(weights)] = True  # needed where all weights are equal and rounding leaves them below 1
    light, heavy = np.flatnonzero(~is_heavy), np.flatnonzero(is_heavy)
    probability, alias = weights.copy(), np.arange(len(counts))
    deficit = np.concatenate([[0.0], np.cumsum(1 - weights[light])])
    surplus = np.cumsum(weights[heavy] - 1)
    # The first heavy word that is still above 1 / V once the light words before this one are topped up.
    donor = np.searchsorted(surplus, deficit[:-1], side="right")
    alias[light] = heavy[np.minimum(donor, len(heavy) - 1)]
    # The weight left to a heavy word once the light words have taken more than its surplus.
    last = np.minimum(np.searchsorted(deficit, surplus), len(light))
    probability[heavy] = 1 + surplus - deficit[last]
    alias[heavy[:-1]] = heavy[1:]
    return NoiseTable(np.clip(probability * 2**32, 0, 2**32 - 1).astype(np.uint32), alias.astype(np.int32))


def draw_noise(key: jax.Array, table: NoiseTable, shape: tuple[int, ...]) -> Int[Array, "*shape"]:
    """Sample noise words from an alias table. Probabilities are exact to 2⁻³² (the C code rounds them to 10⁻⁸)."""
    bits = jax.random.bits(key, shape, jnp.uint32)
    slot, fraction = _long_product(bits, len(table.probability))  # bits · V = slot · 2³² + fraction
    is_slot = fraction < jnp.asarray(table.probability)[slot]
    return jnp.where(is_slot, slot, jnp.asarray(table.alias)[slot]).astype(jnp.int32)


def _long_product(a: UInt32[Array, "*shape"], b: int) -> tuple[UInt32[Array, "*shape"], UInt32[Array, "*shape"]]:
    """Return (a · b) // 2³² and (a · b) mod 2³², by halves of 16 bits.

    (jax.lax.mulhi does not compile for a mesh.)
    """
    a_high, a_low, (b_high, b_low) = a >> 16, a & 0xFFFF, divmod(b, 2**16)
    middle = a_high * b_low + (a_low * b_low >> 16)
    return a_high * b_high + (middle >> 16) + ((a_low * b_high + (middle & 0xFFFF)) >> 16), a * jnp.uint32(b)
