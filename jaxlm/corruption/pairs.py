"""Rows of one or two segments from rows of text: sentence pairs for next-sentence prediction (BERT, Devlin et al. 2018,
section 3.1, Task #2) and sentence order (ALBERT, Lan et al. 2019, section 3.1), and the short rows among them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxlm.types import TokenBatch


class Pairs(NamedTuple):
    """`[CLS] A [SEP] B [SEP]` rows.

    input_ids, token_type_ids, attention_mask: int32 [batch, length + 3]; type 1 from the first token of B to the end.
    is_random: int32 [batch], 1 where B comes from another row (BERT's label order: 0 = is next, 1 = random).
    is_swapped: int32 [batch], 1 where the row's second part stands first.
    has_pair: int32 [batch], 0 for rows too short to be cut in two and for those that stay one segment.
    """

    input_ids: Array
    token_type_ids: Array
    attention_mask: Array
    is_random: Array
    is_swapped: Array
    has_pair: Array


def shorten(key: jax.Array, batch: TokenBatch, *, rate: float, least: int) -> TokenBatch:
    """With probability `rate` a row is cut after a number of tokens drawn evenly from `least` to the batch's width: a
    model that only ever saw full rows is poor at short texts (BERT's short_seq_prob).
    """
    tokens, segment_ids = jnp.asarray(batch.tokens), jnp.asarray(batch.segment_ids)
    rows, length = tokens.shape
    key_which, key_size = jax.random.split(key)
    size = jax.random.randint(key_size, (rows,), min(least, length), length + 1)
    size = jnp.where(jax.random.bernoulli(key_which, rate, (rows,)), size, length)
    kept = jnp.arange(length)[None, :] < size[:, None]
    return TokenBatch(jnp.where(kept, tokens, 0), jnp.where(kept, segment_ids, 0))


def sentence_pairs(
    key: jax.Array, batch: TokenBatch, word_start: Bool[Array, " vocab"], sentence_end: Bool[Array, " vocab"], *,
    cls: int, sep: int, pad: int, random_rate: float = 0.5, single_rate: float = 0.0, swap_rate: float = 0.0,
) -> Pairs:
    """Cuts each row in two at a random sentence end and, with probability random_rate, takes the second part of a row
    of another document instead.

    A row without a sentence end is cut at the word start nearest to its middle. Rows of other documents are sought
    among those whose second part is of about the same size; both are cut to the shorter one, swapped or not, so that
    lengths do not reveal a swap. With random_rate 0 nothing is lost. word_start and sentence_end are tables by id.

    With probability single_rate a row stays one segment, `[CLS] A [SEP]` (ELECTRA). With probability swap_rate, which
    needs random_rate 0, the two parts of a row change places (ALBERT). Where sentences could tell the order by where
    they break off, both parts are of whole sentences: what stands before the first sentence and after the last one is
    left out. A row of too few sentences for that keeps all its text and is cut at its middle.
    """
    tokens, segment_ids = jnp.asarray(batch.tokens), jnp.asarray(batch.segment_ids)
    rows, length = tokens.shape
    key_swap, key_order, key_single, key_cut = jax.random.split(key, 4)

    sizes = jnp.sum(segment_ids > 0, axis=1)
    single = jax.random.bernoulli(key_single, single_rate, (rows,))
    if swap_rate > 0:
        inner, inner_sizes = _whole_sentences(tokens, sizes, word_start, sentence_end)
        inner_cut, whole = _cut(key_cut, inner, inner_sizes, word_start, sentence_end)
        size_a, _ = _cut(key_cut, tokens, sizes, word_start, jnp.zeros_like(sentence_end))
        tokens = jnp.where(whole[:, None], inner, tokens)
        size_a, sizes = jnp.where(whole, inner_cut, size_a), jnp.where(whole, inner_sizes, sizes)
        at_sentence = whole
    else:
        size_a, at_sentence = _cut(key_cut, tokens, sizes, word_start, sentence_end)
    size_a = jnp.where(single, sizes, size_a)
    has_pair = (sizes >= 2) & ~single
    own = jnp.arange(rows)
    kind = jnp.where(has_pair, 1 + at_sentence, 0)
    partner = _partners(key_order, sizes - size_a, kind, segment_ids[:, 0]) if random_rate > 0 else own
    is_random = jax.random.bernoulli(key_swap, random_rate, (rows,)) & (partner != own)
    size_b = jnp.minimum(sizes - size_a, (sizes - size_a)[partner])
    source = jnp.where(is_random, partner, own)
    other, start_b = tokens[source], size_a[source]
    is_swapped = jnp.zeros_like(has_pair)
    if swap_rate > 0:
        is_swapped = jax.random.bernoulli(key_swap, swap_rate, (rows,)) & has_pair
        start_b = jnp.where(is_swapped, 0, start_b)
        size_a = jnp.where(is_swapped, size_b, size_a)
        size_b = sizes - size_a

    # Position p of the new row: 0 is [CLS], then A, [SEP], B, [SEP], padding.
    p = jnp.arange(length + 3)[None, :]
    size_a, size_b, start_b = size_a[:, None], size_b[:, None], start_b[:, None]
    start_a = jnp.where(is_swapped[:, None], size_b, 0)
    a = jnp.take_along_axis(tokens, jnp.clip(p - 1 + start_a, 0, length - 1), axis=1)
    b = jnp.take_along_axis(other, jnp.clip(p - 2 - size_a + start_b, 0, length - 1), axis=1)
    end_a, end_b = 1 + size_a, 2 + size_a + size_b
    ids = jnp.select([p == 0, p < end_a, p == end_a, p < end_b, p == end_b], [cls, a, sep, b, sep], pad)
    real = (p <= jnp.where(single[:, None], end_a, end_b)) & (sizes[:, None] > 0)
    ids = jnp.where(real, ids, pad).astype(jnp.int32)
    return Pairs(
        input_ids=ids,
        token_type_ids=((p > end_a) & real).astype(jnp.int32),
        attention_mask=real.astype(jnp.int32),
        is_random=is_random.astype(jnp.int32),
        is_swapped=is_swapped.astype(jnp.int32),
        has_pair=has_pair.astype(jnp.int32),
    )


def _sentence_starts(
    tokens: Int[Array, "rows length"], word_start: Bool[Array, " vocab"], sentence_end: Bool[Array, " vocab"]
) -> Bool[Array, "rows length"]:
    """Where a sentence begins because one has ended: "3.14" in pieces that do not begin words has none, "?!" one."""
    ends = sentence_end[tokens]
    return jnp.pad(ends[:, :-1], ((0, 0), (1, 0))) & ~ends & word_start[tokens]


def _whole_sentences(
    tokens: Int[Array, "rows length"], sizes: Int[Array, " rows"], word_start: Bool[Array, " vocab"],
    sentence_end: Bool[Array, " vocab"],
) -> tuple[Int[Array, "rows length"], Int[Array, " rows"]]:
    """Each row from its first sentence start to its last sentence end, and how many tokens these are."""
    length = tokens.shape[1]
    p = jnp.arange(length)[None, :]
    starts = _sentence_starts(tokens, word_start, sentence_end) & (p < sizes[:, None])
    first = jnp.argmax(starts, axis=1)
    final = jnp.take_along_axis(tokens, jnp.maximum(sizes - 1, 0)[:, None], axis=1)[:, 0]
    last = jnp.where(sentence_end[final], sizes, jnp.max(jnp.where(starts, p, 0), axis=1))
    sizes = jnp.where(jnp.any(starts, axis=1), last - first, 0)
    return jnp.take_along_axis(tokens, jnp.minimum(first[:, None] + p, length - 1), axis=1), sizes


def _cut(
    key: jax.Array, tokens: Int[Array, "rows length"], sizes: Int[Array, " rows"], word_start: Bool[Array, " vocab"],
    sentence_end: Bool[Array, " vocab"],
) -> tuple[Int[Array, " rows"], Bool[Array, " rows"]]:
    """How many tokens of each row stand before the cut, and whether a sentence ends there."""
    length = tokens.shape[1]
    p = jnp.arange(length)[None, :]
    inside = (p > 0) & (p < sizes[:, None])
    from_middle = jnp.abs(2 * p - sizes[:, None])
    sentence = _sentence_starts(tokens, word_start, sentence_end)
    # The first and last tenth of a row are left out: with parts of sentences there, lengths would spread more
    # than those of BERT's whole sentences do.
    sentence &= inside & (5 * from_middle <= 4 * sizes[:, None])
    near = -from_middle - jnp.where(word_start[tokens], 0, length // 4)
    score = jnp.where(sentence, 1.0 + jax.random.uniform(key, tokens.shape), jnp.where(inside, near, -4 * length))
    return jnp.argmax(score, axis=1), jnp.any(sentence, axis=1)


def _partners(
    key: jax.Array, sizes: Int[Array, " rows"], kind: Int[Array, " rows"], document: Int[Array, " rows"]
) -> Int[Array, " rows"]:
    """For each row another of the same kind (0: none), of another document, and of about its size; else itself.

    The rows stand in order of kind and size, equal ones shuffled, and each looks at the 7 others of its group of 8. If
    one may take the other, the other may take the one: being the shorter or the longer says nothing about a swap.
    """
    rows = sizes.shape[0]
    order = jnp.lexsort((jax.random.uniform(key, (rows,)), -sizes, -kind))
    place = np.arange(rows)[:, None] ^ np.arange(1, 8)
    own, other = order[:, None], order[np.minimum(place, rows - 1)]
    fits = (place < rows) & (kind[other] == kind[own]) & (kind[own] > 0) & (document[other] != document[own])
    first = jnp.take_along_axis(other, jnp.argmax(fits, axis=1, keepdims=True), axis=1)[:, 0]
    return jnp.zeros_like(order).at[order].set(jnp.where(jnp.any(fits, axis=1), first, order))


def single_segments(batch: TokenBatch, *, cls: int, sep: int, pad: int) -> tuple[Array, Array]:
    """`[CLS] tokens [SEP]` rows: (ids, attention mask), int32 [batch, length + 2]. Empty rows stay empty."""
    tokens, segment_ids = jnp.asarray(batch.tokens), jnp.asarray(batch.segment_ids)
    rows, length = tokens.shape
    sizes = jnp.sum(segment_ids > 0, axis=1)[:, None]
    p = jnp.arange(length + 2)[None, :]
    text = jnp.take_along_axis(tokens, jnp.clip(jnp.broadcast_to(p - 1, (rows, length + 2)), 0, length - 1), axis=1)
    ids = jnp.select([p == 0, p <= sizes, p == sizes + 1], [cls, text, sep], pad)
    real = (p <= sizes + 1) & (sizes > 0)
    return jnp.where(real, ids, pad).astype(jnp.int32), real.astype(jnp.int32)
