"""Rows of one or two segments from rows of text: sentence pairs for next-sentence prediction (BERT, Devlin et al. 2018,
section 3.1, Task #2), and the short rows among them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxlm.types import TokenBatch


class Pairs(NamedTuple):
    """`[CLS] A [SEP] B [SEP]` rows.

    input_ids, token_type_ids, attention_mask: int32 [batch, length + 3]; type 1 from the first token of B to the end.
    is_random: int32 [batch], 1 where B comes from another row (BERT's label order: 0 = is next, 1 = random).
    has_pair: int32 [batch], 0 for rows too short to be cut in two and for those that stay one segment.
    """

    input_ids: Array
    token_type_ids: Array
    attention_mask: Array
    is_random: Array
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
    key: jax.Array, batch: TokenBatch, *, cls: int, sep: int, pad: int, random_rate: float = 0.5,
    single_rate: float = 0.0,
) -> Pairs:
    """Cuts each row in half and, with probability random_rate, takes the second half of another row instead.

    Rows are sorted by size and paired, ties in random order. Both rows of a pair are cut around their middles to the
    shorter one's halves, swapped or not, so that lengths do not reveal a swap. With random_rate 0 nothing is cut.

    With probability single_rate a row stays one segment, `[CLS] A [SEP]` (ELECTRA).
    """
    tokens, segment_ids = jnp.asarray(batch.tokens), jnp.asarray(batch.segment_ids)
    rows, length = tokens.shape
    key_swap, key_order, key_single = jax.random.split(key, 3)

    sizes = jnp.sum(segment_ids > 0, axis=1)
    single = jax.random.bernoulli(key_single, single_rate, (rows,))
    middle = jnp.where(single, sizes, sizes // 2)
    has_pair = (sizes >= 2) & ~single
    own = jnp.arange(rows)
    partner = _partners(key_order, jnp.where(has_pair, sizes - middle, 0)) if random_rate > 0 else own
    # A row swaps only with a row that has a second half of its own.
    partner = jnp.where(has_pair & has_pair[partner], partner, own)
    is_random = jax.random.bernoulli(key_swap, random_rate, (rows,)) & (partner != own)
    size_b = jnp.minimum(sizes - middle, (sizes - middle)[partner])
    size_a = jnp.minimum(middle, jnp.where(partner != own, size_b, middle))
    source = jnp.where(is_random, partner, own)
    other, start_a, start_b = tokens[source], middle - size_a, middle[source]

    # Position p of the new row: 0 is [CLS], then A, [SEP], B, [SEP], padding.
    p = jnp.arange(length + 3)[None, :]
    size_a, size_b, start_a, start_b = size_a[:, None], size_b[:, None], start_a[:, None], start_b[:, None]
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
        has_pair=has_pair.astype(jnp.int32),
    )


def _partners(key: jax.Array, sizes: Int[Array, " rows"]) -> Int[Array, " rows"]:
    """Each row's partner: the rows in order of size, equal ones shuffled, two by two; an odd one out has itself."""
    rows = sizes.shape[0]
    order = jnp.lexsort((jax.random.uniform(key, (rows,)), -sizes))
    place = jnp.arange(rows)
    beside = order[jnp.minimum(place ^ 1, rows - 1)]
    return jnp.zeros_like(order).at[order].set(beside)


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
