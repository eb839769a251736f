"""Masking of contiguous spans of whole words (SpanBERT, Joshi et al. 2019, section 3.1)."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxlm.corruption.masking import in_slots, number_words, write_at


class MaskedSpans(NamedTuple):
    """Masked rows and the tokens to predict, by their names in an example.

    A span is a run of masked tokens: adjacent and overlapping spans merge.

    Attributes:
        input_ids: corrupted rows, int32 [batch, length].
        masked_positions: predicted positions in ascending order, int32 [batch, predictions]; unused slots hold 0.
        masked_labels: the original token at each position, int32 [batch, predictions].
        masked_weights: 1 for used slots, 0 for the others, float32 [batch, predictions].
        boundary_left: position before the span of each prediction, int32 [batch, predictions].
        boundary_right: position after the span of each prediction, int32 [batch, predictions].
        boundary_offsets: number of tokens of the span before each prediction, int32 [batch, predictions].
        boundary_weights: 1 where text stands on both sides of the span, float32 [batch, predictions].
    """

    input_ids: Array
    masked_positions: Array
    masked_labels: Array
    masked_weights: Array
    boundary_left: Array
    boundary_right: Array
    boundary_offsets: Array
    boundary_weights: Array


def span_budget(size: int, rate: float) -> int:
    """Return the number of masked tokens in a row of `size` tokens of text, rounded up as in the original code."""
    return math.ceil(rate * size)


def choose_spans(
    key: jax.Array, candidates: Bool[Array, "batch length"], count: Int[Array, " batch"],
    word_start: Bool[Array, "batch length"], slots: int, success: float, longest: int,
) -> Bool[Array, "batch length"]:
    """Choose spans of whole words with exactly `count` tokens per row; the last span may be cut short.

    A span has n words with probability ∝ (1 - success)ⁿ for 1 <= n <= longest. It begins with the word of a token drawn
    uniformly from those not masked yet, and continues through words that are already masked.

    Args:
        key: sampling key.
        candidates: positions that may be chosen.
        count: number of tokens to choose in each row, at most `slots` and the number of candidates.
        word_start: tokens that begin a word.
        slots: static maximum of `count`.
        success: parameter of the geometric distribution of span lengths.
        longest: largest number of words in a span.

    Returns:
        Mask of the chosen positions.
    """
    rows = candidates.shape[0]
    key_words, key_anchor = jax.random.split(key)
    word, _ = number_words(candidates, word_start)
    share = jnp.cumsum((1.0 - success) ** jnp.arange(longest))  # unnormalized probability of at most n words
    words = 1 + jnp.sum(jax.random.uniform(key_words, (rows, slots, 1)) * share[-1] >= share[:-1], axis=-1)
    anchors = jax.random.uniform(key_anchor, (rows, slots))

    def unfinished(state):
        trial, selected = state
        return (trial < slots) & jnp.any(jnp.sum(selected, axis=1) < count)

    def mask_one(state):  # selects at least one token in each unfinished row
        trial, selected = state
        ranks = jnp.cumsum(candidates & ~selected, axis=1)
        # Same distribution as the original code, which draws from all tokens until it finds an unmasked one.
        number = jnp.minimum(jnp.floor(anchors[:, trial] * ranks[:, -1]), ranks[:, -1] - 1)
        anchor = jnp.argmax(ranks > number[:, None], axis=1)[:, None]
        first = jnp.take_along_axis(word, anchor, axis=1)
        new = candidates & ~selected & (word >= first) & (word < first + words[:, trial][:, None])
        left = count - jnp.sum(selected, axis=1)
        return trial + 1, selected | (new & (jnp.cumsum(new, axis=1) <= left[:, None]))

    _, selected = jax.lax.while_loop(unfinished, mask_one, (jnp.array(0), jnp.zeros_like(candidates)))
    return selected


def mask_spans(
    key: jax.Array,
    input_ids: Int[Array, "batch length"],
    special: Bool[Array, " vocab"],
    word_start: Bool[Array, " vocab"],
    token_share: Float[Array, " vocab"],
    *,
    mask: int,
    attention_mask: Int[Array, "batch length"],
    rate: float = 0.15,
    slots: int,
    success: float = 0.2,
    longest: int = 10,
    mask_share: float = 0.8,
    random_share: float = 0.1,
) -> MaskedSpans:
    """Apply SpanBERT's masking: choose spans of `rate` of the tokens, replace 80 % by `mask`, 10 % by random tokens.

    The choice of replacement is per span, and its shares are of spans. Random tokens follow the corpus distribution, as
    in the original code: `token_share` is the cumulative one of ids, ascending to 1. Other arguments are those of
    `mask_tokens` and `choose_spans`.
    """
    rows, length = input_ids.shape
    key_spans, key_kind, key_random = jax.random.split(key, 3)
    candidates = (attention_mask > 0) & ~special[input_ids]
    budget = np.minimum([span_budget(size, rate) for size in range(length + 1)], slots).astype(np.int32)
    count = jnp.asarray(budget)[jnp.sum(candidates, axis=1)]
    selected = choose_spans(key_spans, candidates, count, word_start[input_ids], slots, success, longest)

    start, end = _span_ends(selected)
    positions, is_used = in_slots(jnp.where(selected, jnp.arange(length), length), length, slots)

    def at(values: jax.Array, where: jax.Array) -> jax.Array:
        return jnp.take_along_axis(values, where, axis=1)

    first, labels = at(start, positions), at(input_ids, positions)
    left, right = jnp.maximum(first - 1, 0), jnp.minimum(at(end, positions) + 1, length - 1)
    kind = at(jax.random.uniform(key_kind, (rows, length)), first)
    drawn = jnp.searchsorted(token_share, jax.random.uniform(key_random, positions.shape), side="right")
    drawn = jnp.minimum(drawn, token_share.shape[0] - 1)
    replacement = jnp.select([kind < mask_share, kind < mask_share + random_share], [mask, drawn], labels)
    return MaskedSpans(
        write_at(input_ids, positions, is_used, replacement), positions, labels, is_used.astype(jnp.float32),
        left.astype(jnp.int32), right.astype(jnp.int32), jnp.where(is_used, positions - first, 0).astype(jnp.int32),
        (is_used & at(candidates, left) & at(candidates, right)).astype(jnp.float32),
    )


def _span_ends(selected: Bool[Array, "batch length"]) -> tuple[Int[Array, "batch length"], Int[Array, "batch length"]]:
    """Return the first and the last position of the span around each selected position."""
    length = selected.shape[1]
    before, after = jnp.pad(selected[:, :-1], ((0, 0), (1, 0))), jnp.pad(selected[:, 1:], ((0, 0), (0, 1)))
    start = jax.lax.cummax(jnp.where(selected & ~before, jnp.arange(length), 0), axis=1)
    end = jax.lax.cummin(jnp.where(selected & ~after, jnp.arange(length), length - 1), axis=1, reverse=True)
    return start, end
