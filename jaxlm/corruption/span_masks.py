"""Masking of contiguous spans of whole words (SpanBERT, Joshi et al. 2019, section 3.1)."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxlm.corruption.masking import number_words


class MaskedSpans(NamedTuple):
    """Corrupted rows and what is asked of them. A span is a run of masked tokens: spans that touch or overlap are one.

    input_ids: int32 [batch, length], corrupted.
    positions: int32 [batch, predictions], ascending; slots that are not used hold 0.
    labels: int32 [batch, predictions], the original token at each position.
    weights: float32 [batch, predictions], 1 for a used slot.
    left, right: int32 [batch, predictions], the places before and after the span of each position.
    offset: int32 [batch, predictions], how many tokens of its span stand before it.
    bounded: float32 [batch, predictions], 1 where text stands on both sides of the span.
    """

    input_ids: Array
    positions: Array
    labels: Array
    weights: Array
    left: Array
    right: Array
    offset: Array
    bounded: Array


def span_budget(size: int, rate: float) -> int:
    """How many of a row's `size` tokens of text are masked: rounded up, as in the original code."""
    return math.ceil(rate * size)


def choose_spans(
    key: jax.Array, candidates: Bool[Array, "batch length"], count: Int[Array, " batch"],
    word_start: Bool[Array, "batch length"], slots: int, success: float, longest: int,
) -> Bool[Array, "batch length"]:
    """True at exactly `count` candidates of each row (at most `slots`, and no more than there are): spans of whole
    words, the last of which may be cut short.

    A span has n words, 1 <= n <= longest, with a probability proportional to (1 - success)^n, and begins with the word
    of a token that is drawn evenly from those not yet masked. It runs on through words that are masked already.
    """
    rows = candidates.shape[0]
    key_words, key_anchor = jax.random.split(key)
    word, _ = number_words(candidates, word_start)
    share = jnp.cumsum((1.0 - success) ** jnp.arange(longest))  # of n words or less, not normalised
    words = 1 + jnp.sum(jax.random.uniform(key_words, (rows, slots, 1)) * share[-1] >= share[:-1], axis=-1)
    anchors = jax.random.uniform(key_anchor, (rows, slots))

    def unfinished(state):
        trial, taken = state
        return (trial < slots) & jnp.any(jnp.sum(taken, axis=1) < count)

    def mask_one(state):  # at least one token of each row that is not finished
        trial, taken = state
        ranks = jnp.cumsum(candidates & ~taken, axis=1)
        # The original code draws from all tokens until it finds one that is not masked, which is the same.
        number = jnp.minimum(jnp.floor(anchors[:, trial] * ranks[:, -1]), ranks[:, -1] - 1)
        anchor = jnp.argmax(ranks > number[:, None], axis=1)[:, None]
        first = jnp.take_along_axis(word, anchor, axis=1)
        new = candidates & ~taken & (word >= first) & (word < first + words[:, trial][:, None])
        left = count - jnp.sum(taken, axis=1)
        return trial + 1, taken | (new & (jnp.cumsum(new, axis=1) <= left[:, None]))

    _, taken = jax.lax.while_loop(unfinished, mask_one, (jnp.array(0), jnp.zeros_like(candidates)))
    return taken


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
    """SpanBERT's corruption: spans of about `rate` of the tokens; 80 % of the spans become `mask`, 10 % random tokens,
    10 % stay: one draw a span.

    special, word_start: tables by id. token_share: by id, the share of tokens with this id or a smaller one, ascending
    to 1; random tokens follow it (the original code draws them from the corpus).
    """
    rows, length = input_ids.shape
    key_spans, key_kind, key_random = jax.random.split(key, 3)
    candidates = (attention_mask > 0) & ~special[input_ids]
    budget = np.minimum([span_budget(size, rate) for size in range(length + 1)], slots).astype(np.int32)
    count = jnp.asarray(budget)[jnp.sum(candidates, axis=1)]
    taken = choose_spans(key_spans, candidates, count, word_start[input_ids], slots, success, longest)

    place = jnp.broadcast_to(jnp.arange(length), (rows, length))
    before, after = jnp.pad(taken[:, :-1], ((0, 0), (1, 0))), jnp.pad(taken[:, 1:], ((0, 0), (0, 1)))
    start = jax.lax.cummax(jnp.where(taken & ~before, place, 0), axis=1)
    end = jax.lax.cummin(jnp.where(taken & ~after, place, length - 1), axis=1, reverse=True)
    positions = jnp.sort(jnp.where(taken, place, length), axis=1)[:, :slots]
    used = positions < length
    positions = jnp.where(used, positions, 0)

    def at(values: jax.Array, where: jax.Array) -> jax.Array:
        return jnp.take_along_axis(values, where, axis=1)

    first, labels = at(start, positions), at(input_ids, positions)
    left, right = jnp.maximum(first - 1, 0), jnp.minimum(at(end, positions) + 1, length - 1)
    kind = at(jax.random.uniform(key_kind, (rows, length)), first)
    drawn = jnp.searchsorted(token_share, jax.random.uniform(key_random, positions.shape), side="right")
    drawn = jnp.minimum(drawn, token_share.shape[0] - 1)
    replacement = jnp.select([kind < mask_share, kind < mask_share + random_share], [mask, drawn], labels)
    # Unused slots write past the end of the row, and such writes are dropped.
    where = jnp.where(used, positions, length)
    corrupted = input_ids.at[jnp.arange(rows)[:, None], where].set(replacement.astype(jnp.int32), mode="drop")
    return MaskedSpans(
        corrupted, positions.astype(jnp.int32), labels, used.astype(jnp.float32), left.astype(jnp.int32),
        right.astype(jnp.int32), jnp.where(used, positions - first, 0).astype(jnp.int32),
        (used & at(candidates, left) & at(candidates, right)).astype(jnp.float32),
    )
