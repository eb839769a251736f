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
    size = jnp.where(jax.random.bernoulli(key_which, float(rate), (rows,)), size, length)
    kept = jnp.arange(length)[None, :] < size[:, None]
    return TokenBatch(jnp.where(kept, tokens, 0), jnp.where(kept, segment_ids, 0))


def sentence_pairs(
    key: jax.Array, batch: TokenBatch, word_start: Bool[Array, " vocab"], sentence_end: Bool[Array, " vocab"], *,
    cls: int, sep: int, pad: int, random_rate: float = 0.5, single_rate: float = 0.0,
) -> Pairs:
    """Cuts each row in two at a random sentence end and, with probability random_rate, takes the second part of a row
    of another document instead.

    A row without a sentence end is cut at the word start nearest to its middle. Rows of other documents are sought
    among those whose second part is of about the same size; both are cut to the shorter one, swapped or not, so that
    lengths do not reveal a swap. With random_rate 0 nothing is lost. word_start and sentence_end are tables by id.

    With probability single_rate a row stays one segment, `[CLS] A [SEP]` (ELECTRA).
    """
    tokens, segment_ids = jnp.asarray(batch.tokens), jnp.asarray(batch.segment_ids)
    rows = tokens.shape[0]
    key_swap, key_order, key_single, key_cut = jax.random.split(key, 4)

    sizes = jnp.sum(segment_ids > 0, axis=1)
    single = jax.random.bernoulli(key_single, float(single_rate), (rows,))
    size_a, at_sentence = _cut(key_cut, tokens, sizes, word_start, sentence_end)
    size_a = jnp.where(single, sizes, size_a)
    has_pair = (sizes >= 2) & ~single
    own = jnp.arange(rows)
    kind = jnp.where(has_pair, 1 + at_sentence, 0)
    partner = _partners(key_order, sizes - size_a, kind, segment_ids[:, 0]) if random_rate > 0 else own
    is_random = jax.random.bernoulli(key_swap, float(random_rate), (rows,)) & (partner != own)
    size_b = jnp.minimum(sizes - size_a, (sizes - size_a)[partner])
    source = jnp.where(is_random, partner, own)
    a, b = _Part(tokens, jnp.zeros_like(sizes), size_a), _Part(tokens[source], size_a[source], size_b)
    return _join(a, b, (sizes > 0) & ~single, is_random, has_pair, cls=cls, sep=sep, pad=pad)


def ordered_pairs(
    key: jax.Array, batch: TokenBatch, word_start: Bool[Array, " vocab"], sentence_end: Bool[Array, " vocab"], *,
    cls: int, sep: int, pad: int, swap_rate: float = 0.5,
) -> Pairs:
    """Cuts each row in two, which change places with probability swap_rate; `is_swapped` says where.

    Both parts are whole sentences, or whole words where a row has too few sentences: what stands before the first
    start and behind the last one is left out, since the places where text breaks off would tell the order.
    """
    tokens, segment_ids = jnp.asarray(batch.tokens), jnp.asarray(batch.segment_ids)
    key_swap, key_cut = jax.random.split(key)
    sizes = jnp.sum(segment_ids > 0, axis=1)
    nowhere, starts = jnp.zeros_like(sentence_end), sentence_starts(tokens, word_start, sentence_end)
    inner, inner_sizes = _trim(tokens, sizes, starts, sentence_end)
    size_a, at_sentence = _cut(key_cut, inner, inner_sizes, word_start, sentence_end)
    words, word_sizes = _trim(tokens, sizes, word_start[tokens], nowhere)
    words = jnp.where(word_sizes[:, None] > 0, words, tokens)
    word_sizes = jnp.where(word_sizes > 0, word_sizes, sizes)
    middle, _ = _cut(key_cut, words, word_sizes, word_start, nowhere)
    tokens, sizes = jnp.where(at_sentence[:, None], inner, words), jnp.where(at_sentence, inner_sizes, word_sizes)
    size_a = jnp.where(at_sentence, size_a, middle)
    has_pair = sizes >= 2
    is_swapped = jax.random.bernoulli(key_swap, float(swap_rate), sizes.shape) & has_pair
    # The part that stands first, and the other.
    a = _Part(tokens, jnp.where(is_swapped, size_a, 0), jnp.where(is_swapped, sizes - size_a, size_a))
    b = _Part(tokens, jnp.where(is_swapped, 0, size_a), sizes - a.size)
    pairs = _join(a, b, sizes > 0, jnp.zeros_like(has_pair), has_pair, cls=cls, sep=sep, pad=pad)
    return pairs._replace(is_swapped=is_swapped.astype(jnp.int32))


class _Part(NamedTuple):
    """`size` tokens of each row from `start` on."""

    tokens: Array
    start: Array
    size: Array


def _join(
    a: _Part, b: _Part, has_b: Array, is_random: Array, has_pair: Array, *, cls: int, sep: int, pad: int
) -> Pairs:
    """Position p of the new row: 0 is [CLS], then A, [SEP], B, [SEP], padding; rows without B end behind the first
    [SEP]. Rows without any token stay padding."""
    length = a.tokens.shape[1]
    p = jnp.arange(length + 3)[None, :]
    size_a, size_b = a.size[:, None], b.size[:, None]

    def tokens_of(part: _Part, before: Array | int) -> Array:
        return jnp.take_along_axis(part.tokens, jnp.clip(p - before + part.start[:, None], 0, length - 1), axis=1)

    end_a, end_b = 1 + size_a, 2 + size_a + size_b
    texts = tokens_of(a, 1), tokens_of(b, 2 + size_a)
    ids = jnp.select([p == 0, p < end_a, p == end_a, p < end_b, p == end_b], [cls, texts[0], sep, texts[1], sep], pad)
    real = (p <= jnp.where(has_b[:, None], end_b, end_a)) & (size_a + size_b > 0)
    return Pairs(
        input_ids=jnp.where(real, ids, pad).astype(jnp.int32),
        token_type_ids=((p > end_a) & real).astype(jnp.int32),
        attention_mask=real.astype(jnp.int32),
        is_random=is_random.astype(jnp.int32),
        is_swapped=jnp.zeros_like(is_random, jnp.int32),
        has_pair=has_pair.astype(jnp.int32),
    )


def sentence_starts(
    tokens: Int[Array, "rows length"], word_start: Bool[Array, " vocab"], sentence_end: Bool[Array, " vocab"]
) -> Bool[Array, "rows length"]:
    """Where a sentence begins because one has ended: "3.14" in pieces that do not begin words has none, "?!" one."""
    ends = sentence_end[tokens]
    return jnp.pad(ends[:, :-1], ((0, 0), (1, 0))) & ~ends & word_start[tokens]


def _trim(
    tokens: Int[Array, "rows length"], sizes: Int[Array, " rows"], starts: Bool[Array, "rows length"],
    complete: Bool[Array, " vocab"],
) -> tuple[Int[Array, "rows length"], Int[Array, " rows"]]:
    """Each row from its first start to its last one, or to its end if that is a `complete` token, and how many tokens
    these are: 0 where there are fewer than two."""
    length = tokens.shape[1]
    p = jnp.arange(length)[None, :]
    starts = starts & (p < sizes[:, None])
    first = jnp.argmax(starts, axis=1)
    final = jnp.take_along_axis(tokens, jnp.maximum(sizes - 1, 0)[:, None], axis=1)[:, 0]
    last = jnp.where(complete[final], sizes, jnp.max(jnp.where(starts, p, 0), axis=1))
    sizes = jnp.where(jnp.any(starts, axis=1) & (last - first > 1), last - first, 0)
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
    sentence = sentence_starts(tokens, word_start, sentence_end)
    # The first and last tenth of a row are left out: with parts of sentences there, lengths would spread more
    # than those of BERT's whole sentences do.
    sentence &= inside & (5 * from_middle <= 4 * sizes[:, None])
    near = -from_middle - jnp.where(word_start[tokens], 0, length // 4)
    draw = jax.random.uniform(key, tokens.shape)  # also between two places that are equally near to the middle
    score = jnp.where(sentence, 1.0 + draw, jnp.where(inside, near + 0.5 * draw, -4 * length))
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
