"""Span corruption and the prefix-LM split (T5, Raffel et al. 2019, sections 3.1.4 and 3.2.1).

The host cuts rows of `raw_length` tokens; each row becomes an input and a target of static lengths. A full row has
exactly the published lengths; a shorter one (the end of a corpus) follows the arithmetic of its own size and is padded.
Rows of fewer than two tokens cannot be split and become padding.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxlm.errors import UserError
from jaxlm.types import TokenBatch


class TextPair(NamedTuple):
    """Input and target, each closed by the end symbol and padded.

    Attributes:
        inputs: int32 [batch, inputs_length].
        inputs_size: number of tokens before the padding, int32 [batch].
        targets: int32 [batch, targets_length].
        targets_size: number of tokens before the padding, int32 [batch].
    """

    inputs: Array
    inputs_size: Array
    targets: Array
    targets_size: Array


class SpanLengths(NamedTuple):
    """Lengths that span corruption produces from `raw` tokens; `inputs` and `targets` count the end symbol."""

    raw: int
    noise: int
    spans: int
    inputs: int
    targets: int


def span_lengths(raw: int, density: float = 0.15, mean_span: float = 3.0) -> SpanLengths:
    """Return the lengths for a row of `raw` tokens (at least 2) by the reference's arithmetic: halves round to even."""
    noise = min(max(round(raw * density), 1), raw - 1)
    # Every span needs a noise token and a text token before it; the last bound matters for dense noise only.
    spans = min(max(round(noise / mean_span), 1), noise, raw - noise)
    return SpanLengths(raw, noise, spans, raw - noise + spans + 1, noise + spans + 1)


@functools.lru_cache(maxsize=64)
def raw_span_length(length: int, density: float = 0.15, mean_span: float = 3.0) -> SpanLengths:
    """Return the lengths of the longest row whose input has at most `length` tokens: 512 -> 568 raw, 114 target tokens.

    As in the reference, at a density of one half a target longer than the input loses one raw token.
    """
    if length < 4:
        raise UserError(
            f"data.length {length} is too short for one span: text, sentinel and end symbol need at least 4."
        )
    raw = 2
    while span_lengths(raw + 1, density, mean_span).inputs <= length:
        raw += 1
    found = span_lengths(raw, density, mean_span)
    if density == 0.5 and found.targets > found.inputs:
        found = span_lengths(raw - 1, density, mean_span)
    return found


def random_segments(
    key: jax.Array, items: Int[Array, " batch"], parts: Int[Array, " batch"], max_items: int, max_parts: int
) -> Int[Array, "batch max_parts"]:
    """Split `items` into `parts` positive lengths (1 <= parts <= items), every composition equally likely.

    A composition is a choice of `parts - 1` of the `items - 1` gaps between neighbours. The gaps are ordered at random
    and the first ones chosen, which is equivalent to the reference's shuffled 0/1 vector. Lengths after `parts` are 0.
    """
    rows = items.shape[0]
    gap = jnp.arange(max_items - 1)[None, :]
    priority = jnp.where(gap < items[:, None] - 1, jax.random.uniform(key, (rows, max_items - 1)), 2.0)
    order = jnp.argsort(priority, axis=1)[:, : max_parts - 1]
    chosen = jnp.arange(max_parts - 1)[None, :] < parts[:, None] - 1
    ends = jnp.sort(jnp.where(chosen, order + 1, items[:, None]), axis=1)
    ends = jnp.concatenate([ends, items[:, None]], axis=1).astype(jnp.int32)
    return jnp.diff(ends, axis=1, prepend=0)


def corrupt_spans(
    key: jax.Array,
    batch: TokenBatch,
    *,
    sentinel: int,
    eos: int,
    pad: int,
    density: float = 0.15,
    mean_span: float = 3.0,
    sentinel_step: int = -1,
) -> TextPair:
    """Replace random spans by the sentinels `sentinel`, `sentinel + sentinel_step`, …; the target spells the spans out.

    Text t0 n0 t1 n1 ... (the first token is never noise, the last always is) becomes the input t0 S0 t1 S1 ... eos and
    the target S0 n0 S1 n1 ... eos. The lengths of the text and noise spans are random segmentations.
    """
    tokens, segment_ids = batch.tokens, batch.segment_ids
    raw = tokens.shape[1]
    longest = span_lengths(raw, density, mean_span)
    # A table by size, since float32 arithmetic on a device would round some halves to the wrong side.
    table = np.zeros((raw + 1, 2), np.int32)
    for size in range(2, raw + 1):
        table[size] = span_lengths(size, density, mean_span)[1:3]
    sizes = jnp.sum(segment_ids > 0, axis=1)
    noise, spans = jnp.moveaxis(jnp.asarray(table)[sizes], -1, 0)

    key_noise, key_text = jax.random.split(key)
    # Rows that cannot be split count as one part of one token, and are blanked at the end.
    is_usable = sizes >= 2
    parts = jnp.where(is_usable, spans, 1)
    noise_lengths = random_segments(key_noise, jnp.where(is_usable, noise, 1), parts, longest.noise, longest.spans)
    text_lengths = random_segments(
        key_text, jnp.where(is_usable, sizes - noise, 1), parts, raw - longest.noise, longest.spans
    )
    ends = jnp.cumsum(text_lengths + noise_lengths, axis=1)
    noise_starts = ends - noise_lengths
    sentinels = sentinel + sentinel_step * jnp.arange(longest.spans)[None, :]

    # The sentinel follows its text in the input and precedes its noise in the target.
    inputs = _interleave(tokens, noise_starts - text_lengths, text_lengths, sentinels, longest.inputs, False)
    targets = _interleave(tokens, noise_starts, noise_lengths, sentinels, longest.targets, True)
    inputs_size = jnp.where(is_usable, sizes - noise + spans + 1, 0)
    targets_size = jnp.where(is_usable, noise + spans + 1, 0)
    return TextPair(
        _close(inputs, inputs_size, eos, pad), inputs_size, _close(targets, targets_size, eos, pad), targets_size
    )


def split_prefix(key: jax.Array, batch: TokenBatch, *, eos: int, pad: int, density: float = 0.5) -> TextPair:
    """Split each row into input (prefix) and target (suffix).

    Both have the row's length, which fits the longest part and the end symbol.

    `density` is the mean share of the target, at most 1/2. Its length is uniform over 1..2 · density · size, short of
    the whole row; with 1/2 the cut is anywhere in the row.
    """
    tokens, segment_ids = batch.tokens, batch.segment_ids
    rows, length = tokens.shape
    sizes = jnp.sum(segment_ids > 0, axis=1)
    is_usable = sizes >= 2
    table = np.maximum([size - int(2 * density * size) for size in range(length + 1)], 1)
    cut = jax.random.randint(key, (rows,), jnp.asarray(table)[sizes], jnp.maximum(sizes, 2))
    where = jnp.minimum(cut[:, None] + jnp.arange(length)[None, :], length - 1)
    suffix = jnp.take_along_axis(tokens, where, axis=1)
    inputs_size = jnp.where(is_usable, cut + 1, 0)
    targets_size = jnp.where(is_usable, sizes - cut + 1, 0)
    return TextPair(
        _close(tokens, inputs_size, eos, pad), inputs_size, _close(suffix, targets_size, eos, pad), targets_size
    )


def _interleave(tokens, starts, lengths, sentinels, width, sentinel_first):
    """Return rows of `width` tokens: each span `starts .. starts + lengths` with its sentinel before or after."""
    occupied = jnp.where(lengths > 0, lengths + 1, 0)
    ends = jnp.cumsum(occupied, axis=1)
    position = jnp.arange(width)[None, :]
    # The span of each position: the number of spans that end at or before it.
    span = jnp.sum(ends[:, None, :] <= position[:, :, None], axis=-1)
    span = jnp.minimum(span, lengths.shape[1] - 1)

    def of_span(values):
        return jnp.take_along_axis(jnp.broadcast_to(values, lengths.shape), span, axis=1)

    offset = position - of_span(ends - occupied)
    is_sentinel = (offset == 0) if sentinel_first else (offset == of_span(lengths))
    source = of_span(starts) + offset - int(sentinel_first)
    picked = jnp.take_along_axis(tokens, jnp.clip(source, 0, tokens.shape[1] - 1), axis=1)
    return jnp.where(is_sentinel, of_span(sentinels), picked)


def _close(ids, size, eos, pad):
    """Put the end symbol at the last of `size` tokens and padding after it."""
    position = jnp.arange(ids.shape[1])[None, :]
    size = size[:, None]
    return jnp.select([position < size - 1, position == size - 1], [ids, eos], pad).astype(jnp.int32)
