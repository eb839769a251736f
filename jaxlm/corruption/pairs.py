"""Rows `[CLS] A [SEP] B [SEP]` and `[CLS] A [SEP]` from rows of text, and random shortening of rows.

Pairs serve next-sentence prediction (BERT, Devlin et al. 2018, section 3.1, Task #2) and sentence-order prediction
(ALBERT, Lan et al. 2019, section 3.1); a sentence and its context serve the inverse cloze task (Lee et al. 2019).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxlm.types import TokenBatch


class Pairs(NamedTuple):
    """Rows `[CLS] A [SEP] B [SEP]` with the labels of a pair task.

    Attributes:
        input_ids: int32 [batch, length + 3].
        token_type_ids: 1 from the first token of B to the end of the row, int32 [batch, length + 3].
        attention_mask: 1 for non-padding tokens, int32 [batch, length + 3].
        label: int32 [batch]. Of `sentence_pairs`: 1 where B comes from another row (BERT's labels: 0 = next, 1 =
            random). Of `ordered_pairs`: 1 where the row's second part comes first.
        has_pair: 1 for rows with a label; 0 for rows too short to split, for rows of one segment, and where B could
            not come from another row, int32 [batch].
        source: place in the text of each token, row · length + column; -1 at special symbols and padding. int32
            [batch, length + 3].
    """

    input_ids: Array
    token_type_ids: Array
    attention_mask: Array
    label: Array
    has_pair: Array
    source: Array


class Segments(NamedTuple):
    """Rows of one or more segments `[CLS] tokens [SEP]`.

    Attributes:
        input_ids: int32 [batch, length + 2].
        documents: number of each token's document in its row, from 1; 0 at padding. In rows of one segment, the
            attention mask. int32 [batch, length + 2].
        source: as in `Pairs`, int32 [batch, length + 2].
    """

    input_ids: Array
    documents: Array
    source: Array


def at_source(
    values: Int[Array, "batch length"], source: Int[Array, "batch positions"]
) -> Int[Array, "batch positions"]:
    """Return the value of each token of `Pairs` or `Segments` in an array beside the text's tokens; -1 for none."""
    return jnp.where(source < 0, -1, values.reshape(-1)[source])


def shorten(key: jax.Array, batch: TokenBatch, *, rate: float, least: int) -> TokenBatch:
    """Cut each row with probability `rate` to a random size between `least` and its width (BERT's short_seq_prob).

    A model that only ever sees full rows performs poorly on short texts.
    """
    tokens, segment_ids = jnp.asarray(batch.tokens), jnp.asarray(batch.segment_ids)
    rows, length = tokens.shape
    key_which, key_size = jax.random.split(key)
    size = jax.random.randint(key_size, (rows,), min(least, length), length + 1)
    size = jnp.where(jax.random.bernoulli(key_which, float(rate), (rows,)), size, length)
    is_kept = jnp.arange(length)[None, :] < size[:, None]
    entities = None if batch.entities is None else jnp.where(is_kept, batch.entities, -1)
    return TokenBatch(jnp.where(is_kept, tokens, 0), jnp.where(is_kept, segment_ids, 0), entities)


def sentence_pairs(
    key: jax.Array, batch: TokenBatch, word_start: Bool[Array, " vocab"], sentence_end: Bool[Array, " vocab"], *,
    cls: int, sep: int, pad: int, random_rate: float = 0.5, single_rate: float = 0.0,
) -> Pairs:
    """Split each row at a random sentence end and replace its second part with probability `random_rate`.

    The replacement comes from a row of another document whose second part has about the same size. Both rows of such a
    couple are cut to the shorter second part, swapped or not, so that lengths do not reveal a swap. A row without such
    a partner has no label, since its second part would always be its own. A row without a sentence end is split at the
    word start nearest to its middle. Without random pairs no token is lost.

    Args:
        key: sampling key.
        batch: rows of text.
        word_start: tokens that begin a word, by id.
        sentence_end: tokens that end a sentence, by id.
        cls: id of [CLS].
        sep: id of [SEP].
        pad: id of padding.
        random_rate: probability that the second part comes from another row.
        single_rate: probability that a row stays one segment, `[CLS] A [SEP]` (ELECTRA).
    """
    tokens, segment_ids = jnp.asarray(batch.tokens), jnp.asarray(batch.segment_ids)
    rows = tokens.shape[0]
    key_swap, key_order, key_single, key_cut = jax.random.split(key, 4)

    sizes = jnp.sum(segment_ids > 0, axis=1)
    is_single = jax.random.bernoulli(key_single, float(single_rate), (rows,))
    size_a, at_sentence = _cut(key_cut, tokens, sizes, word_start, sentence_end)
    size_a = jnp.where(is_single, sizes, size_a)
    has_pair = (sizes >= 2) & ~is_single
    row = jnp.arange(rows)
    kind = jnp.where(has_pair, 1 + at_sentence, 0)
    partner = _partners(key_order, sizes - size_a, kind, segment_ids[:, 0]) if random_rate > 0 else row
    has_pair &= (partner != row) | (random_rate <= 0)
    is_random = jax.random.bernoulli(key_swap, float(random_rate), (rows,)) & has_pair
    size_b = jnp.minimum(sizes - size_a, (sizes - size_a)[partner])
    source = jnp.where(is_random, partner, row)
    a = _Part(tokens, row, 0, jnp.zeros_like(sizes), size_a)
    b = _Part(tokens[source], source, 0, size_a[source], size_b)
    return _join(a, b, (sizes > 0) & ~is_single, is_random, has_pair, cls=cls, sep=sep, pad=pad)


def ordered_pairs(
    key: jax.Array, batch: TokenBatch, word_start: Bool[Array, " vocab"], sentence_end: Bool[Array, " vocab"], *,
    cls: int, sep: int, pad: int,
) -> Pairs:
    """Split each row in two parts and swap them with probability 0.5.

    Both parts are whole sentences, or whole words in rows with too few sentences. Text before the first start and after
    the last one is dropped, since the places where text breaks off would reveal the order.
    """
    tokens, segment_ids = jnp.asarray(batch.tokens), jnp.asarray(batch.segment_ids)
    key_swap, key_cut = jax.random.split(key)
    sizes = jnp.sum(segment_ids > 0, axis=1)
    no_sentence_end, starts = jnp.zeros_like(sentence_end), sentence_starts(tokens, word_start, sentence_end)
    inner, inner_sizes, inner_start = _trim(tokens, sizes, starts, sentence_end)
    size_a, at_sentence = _cut(key_cut, inner, inner_sizes, word_start, sentence_end)
    words, word_sizes, first_word = _trim(tokens, sizes, word_start[tokens], no_sentence_end)
    words = jnp.where(word_sizes[:, None] > 0, words, tokens)
    first_word = jnp.where(word_sizes > 0, first_word, 0)
    word_sizes = jnp.where(word_sizes > 0, word_sizes, sizes)
    middle, _ = _cut(key_cut, words, word_sizes, word_start, no_sentence_end)
    tokens, sizes = jnp.where(at_sentence[:, None], inner, words), jnp.where(at_sentence, inner_sizes, word_sizes)
    size_a = jnp.where(at_sentence, size_a, middle)
    has_pair = sizes >= 2
    is_swapped = jax.random.bernoulli(key_swap, 0.5, sizes.shape) & has_pair
    # `a` is the part that comes first in the new row.
    row, trimmed = jnp.arange(sizes.size), jnp.where(at_sentence, inner_start, first_word)
    a = _Part(tokens, row, trimmed, jnp.where(is_swapped, size_a, 0), jnp.where(is_swapped, sizes - size_a, size_a))
    b = _Part(tokens, row, trimmed, jnp.where(is_swapped, 0, size_a), sizes - a.size)
    return _join(a, b, sizes > 0, is_swapped, has_pair, cls=cls, sep=sep, pad=pad)


def inverse_cloze(
    key: jax.Array, batch: TokenBatch, word_start: Bool[Array, " vocab"], sentence_end: Bool[Array, " vocab"], *,
    keep_rate: float, longest: int,
) -> tuple[TokenBatch, TokenBatch]:
    """Take a random sentence out of each row (inverse cloze task, Lee et al. 2019, section 4).

    Each sentence is equally likely, also the parts of one with which a row begins and ends. A row without a sentence
    end, or with none but in its first and last tenth, is also split at the word start nearest to its middle. With
    probability `keep_rate` the sentence also stays in its row.

    Returns:
        The first `longest` tokens of each sentence, and the rest of each row; none of a row of a single token.
    """
    tokens = jnp.asarray(batch.tokens)
    key_cut, key_sentence, key_keep = jax.random.split(key, 3)
    sizes, p = jnp.sum(jnp.asarray(batch.segment_ids) > 0, axis=1), jnp.arange(tokens.shape[1])[None, :]
    middle, at_sentence = _cut(key_cut, tokens, sizes, word_start, sentence_end)
    starts = sentence_starts(tokens, word_start, sentence_end) | (p == 0)
    starts |= (p == middle[:, None]) & ~at_sentence[:, None]
    draw = jax.random.uniform(key_sentence, tokens.shape)
    first = jnp.argmax(jnp.where(starts & (p < sizes[:, None]), draw, -1.0), axis=1)
    after = starts & (p > first[:, None]) & (p < sizes[:, None])
    size = jnp.min(jnp.where(after, p, sizes[:, None]), axis=1) - first
    left_out = jnp.where(jax.random.bernoulli(key_keep, float(keep_rate), sizes.shape), 0, size)

    def text(column: Array, count: Array) -> TokenBatch:
        ids = jnp.take_along_axis(tokens, jnp.minimum(column, tokens.shape[1] - 1), axis=1)
        is_text = p < jnp.where(size < sizes, count, 0)[:, None]
        return TokenBatch(jnp.where(is_text, ids, 0), is_text.astype(jnp.int32))

    rest = p + jnp.where(p < first[:, None], 0, left_out[:, None])
    return text(p + first[:, None], jnp.minimum(size, longest)), text(rest, sizes - left_out)


class _Part(NamedTuple):
    """Span of `size` of the `tokens` of each row, from `start` on.

    They are those of the batch's row `row` without its first `trimmed` tokens.
    """

    tokens: Array
    row: Array
    trimmed: Array | int
    start: Array
    size: Array


def _join(
    a: _Part, b: _Part, has_b: Array, label: Array, has_pair: Array, *, cls: int, sep: int, pad: int
) -> Pairs:
    """Build the rows [CLS] A [SEP] B [SEP] padding; rows without B end after the first [SEP].

    Rows without any token stay padding.
    """
    length = a.tokens.shape[1]
    p = jnp.arange(length + 3)[None, :]
    size_a, size_b = a.size[:, None], b.size[:, None]

    def tokens_of(part: _Part, before: Array | int) -> tuple[Array, Array]:
        column = jnp.clip(p - before + part.start[:, None], 0, length - 1)
        source = (part.row * length + part.trimmed)[:, None] + column
        return jnp.take_along_axis(part.tokens, column, axis=1), source

    end_a, end_b = 1 + size_a, 2 + size_a + size_b
    (text_a, source_a), (text_b, source_b) = tokens_of(a, 1), tokens_of(b, 2 + size_a)
    kinds = [p == 0, p < end_a, p == end_a, p < end_b, p == end_b]
    ids = jnp.select(kinds, [cls, text_a, sep, text_b, sep], pad)
    source = jnp.select(kinds, [-1, source_a, -1, source_b, -1], -1)
    is_token = (p <= jnp.where(has_b[:, None], end_b, end_a)) & (size_a + size_b > 0)
    return Pairs(
        input_ids=jnp.where(is_token, ids, pad).astype(jnp.int32),
        token_type_ids=((p > end_a) & is_token).astype(jnp.int32),
        attention_mask=is_token.astype(jnp.int32),
        label=label.astype(jnp.int32),
        has_pair=has_pair.astype(jnp.int32),
        source=jnp.where(is_token, source, -1).astype(jnp.int32),
    )


def sentence_starts(
    tokens: Int[Array, "rows length"], word_start: Bool[Array, " vocab"], sentence_end: Bool[Array, " vocab"]
) -> Bool[Array, "rows length"]:
    """Return a mask of the tokens that begin a sentence because another one has ended.

    The pieces of "3.14" that do not begin words begin no sentence; "?!" ends only one.
    """
    ends = sentence_end[tokens]
    return jnp.pad(ends[:, :-1], ((0, 0), (1, 0))) & ~ends & word_start[tokens]


def _trim(
    tokens: Int[Array, "rows length"], sizes: Int[Array, " rows"], starts: Bool[Array, "rows length"],
    complete: Bool[Array, " vocab"],
) -> tuple[Int[Array, "rows length"], Int[Array, " rows"], Int[Array, " rows"]]:
    """Cut each row to the text between its first start and its last one, or its end if that is a `complete` token.

    Returns:
        The trimmed rows; their sizes, 0 for rows with fewer than two tokens between; and the tokens cut off before.
    """
    length = tokens.shape[1]
    p = jnp.arange(length)[None, :]
    starts = starts & (p < sizes[:, None])
    first = jnp.argmax(starts, axis=1)
    final = jnp.take_along_axis(tokens, jnp.maximum(sizes - 1, 0)[:, None], axis=1)[:, 0]
    last = jnp.where(complete[final], sizes, jnp.max(jnp.where(starts, p, 0), axis=1))
    sizes = jnp.where(jnp.any(starts, axis=1) & (last - first > 1), last - first, 0)
    return jnp.take_along_axis(tokens, jnp.minimum(first[:, None] + p, length - 1), axis=1), sizes, first


def _cut(
    key: jax.Array, tokens: Int[Array, "rows length"], sizes: Int[Array, " rows"], word_start: Bool[Array, " vocab"],
    sentence_end: Bool[Array, " vocab"],
) -> tuple[Int[Array, " rows"], Bool[Array, " rows"]]:
    """Choose where to split each row.

    Returns:
        The number of tokens before the split, and whether a sentence ends there.
    """
    length = tokens.shape[1]
    p = jnp.arange(length)[None, :]
    is_inside = (p > 0) & (p < sizes[:, None])
    from_middle = jnp.abs(2 * p - sizes[:, None])
    sentence = sentence_starts(tokens, word_start, sentence_end)
    # No split in the first and last tenth of a row: rows begin and end within sentences, so lengths would spread more
    # than those of BERT's whole sentences do.
    sentence &= is_inside & (5 * from_middle <= 4 * sizes[:, None])
    near = -from_middle - jnp.where(word_start[tokens], 0, length // 4)
    draw = jax.random.uniform(key, tokens.shape)  # also breaks ties between two positions equally near to the middle
    score = jnp.where(sentence, 1.0 + draw, jnp.where(is_inside, near + 0.5 * draw, -4 * length))
    return jnp.argmax(score, axis=1), jnp.any(sentence, axis=1)


def _partners(
    key: jax.Array, sizes: Int[Array, " rows"], kind: Int[Array, " rows"], document: Int[Array, " rows"]
) -> Int[Array, " rows"]:
    """Match rows of the same kind, of different documents and of about the same size; the rest match themselves.

    The result is an involution, so that a row is the shorter of its couple as often as the longer one: neither its
    length nor where its second part breaks off tells whether it was swapped. The rows are sorted by kind and size,
    equal ones shuffled, and matched greedily within groups of 8. The rows that are left are sorted and matched again.
    Rows of kind 0 stay unmatched.
    """
    place, partner = np.arange(sizes.size), jnp.arange(sizes.size)
    for key_order in jax.random.split(key):
        kind = jnp.where(partner == place, kind, 0)
        order = jnp.lexsort((jax.random.uniform(key_order, sizes.shape), -sizes, -kind))
        kinds, documents, mate = kind[order], document[order], jnp.asarray(place)
        for step in range(1, 8):  # place ^ step is an involution, so that both rows of a couple agree
            other = np.minimum(place ^ step, sizes.size - 1)
            is_free = (place ^ step < sizes.size) & (mate == place) & (mate[other] == other)
            fits = (kinds == kinds[other]) & (kinds > 0) & (documents != documents[other])
            mate = jnp.where(is_free & fits, other, mate)
        partner = jnp.where(kind > 0, partner.at[order].set(order[mate]), partner)
    return partner


def single_segments(batch: TokenBatch, *, cls: int, sep: int, pad: int, by_document: bool = False) -> Segments:
    """Build rows `[CLS] tokens [SEP]`; empty rows stay empty.

    Without `by_document` a row is one segment, also if it holds text of several documents (RoBERTa's full sentences).
    With it each document has its own symbols, and a row ends with 2 tokens of padding for each document but the first.
    """
    tokens, segment_ids = jnp.asarray(batch.tokens), jnp.asarray(batch.segment_ids)
    rows, length = tokens.shape
    is_text = segment_ids > 0
    segment_ids = segment_ids if by_document else is_text.astype(jnp.int32)
    begins = is_text & (segment_ids != jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0))))
    # Two symbols stand before the first token of each document but the first one, which has one.
    place = jnp.arange(length) + 2 * jnp.cumsum(begins, axis=1) - 1
    column = jax.vmap(lambda place: jnp.full(length + 2, -1).at[place].set(jnp.arange(length), mode="drop"))(
        jnp.where(is_text, place, length + 2)
    )
    has_text = jnp.pad(column >= 0, ((0, 0), (1, 1)))
    before, here, after = has_text[:, :-2], has_text[:, 1:-1], has_text[:, 2:]
    is_cls = ~here & after
    text = jnp.take_along_axis(tokens, column, axis=1)
    ids = jnp.select([here, is_cls, before], [text, cls, sep], pad)
    documents = jnp.where(here | before | after, jnp.cumsum(is_cls, axis=1), 0)
    source = jnp.where(here, jnp.arange(rows)[:, None] * length + column, -1)
    return Segments(ids.astype(jnp.int32), documents.astype(jnp.int32), source.astype(jnp.int32))
