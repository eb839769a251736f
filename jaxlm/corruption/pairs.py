"""Sentence pairs for next-sentence prediction (BERT, Devlin et al. 2018, section 3.1, Task #2)."""

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
    has_pair: int32 [batch], 0 for rows too short to be cut in two.
    """

    input_ids: Array
    token_type_ids: Array
    attention_mask: Array
    is_random: Array
    has_pair: Array


def sentence_pairs(
    key: jax.Array, batch: TokenBatch, *, cls: int, sep: int, pad: int, random_rate: float = 0.5
) -> Pairs:
    """Cuts each row in half and, with probability random_rate, takes the second half of another row instead.

    The rows that swap take the second half of the row `shift` places on, with one random shift for the batch: every
    other row is equally likely to be the partner, and a row is never its own. The halves are at most
    ceil(length / 2), so a swapped pair always fits and nothing is truncated.
    """
    tokens, segment_ids = jnp.asarray(batch.tokens), jnp.asarray(batch.segment_ids)
    rows, length = tokens.shape
    key_swap, key_shift = jax.random.split(key)

    sizes = jnp.sum(segment_ids > 0, axis=1)
    size_a = sizes // 2
    size_b = sizes - size_a
    has_pair = sizes >= 2

    # A row swaps only with a row that has a second half of its own.
    shift = jax.random.randint(key_shift, (), 1, max(rows, 2))
    partner = (jnp.arange(rows) + shift) % rows
    wants = jax.random.bernoulli(key_swap, random_rate, (rows,))
    is_random = wants & has_pair & has_pair[partner] & (partner != jnp.arange(rows))
    source = jnp.where(is_random, partner, jnp.arange(rows))
    other, start_b, size_b = tokens[source], size_a[source], size_b[source]

    # Position p of the new row: 0 is [CLS], then A, [SEP], B, [SEP], padding.
    p = jnp.arange(length + 3)[None, :]
    size_a, size_b, start_b = size_a[:, None], size_b[:, None], start_b[:, None]
    a = jnp.take_along_axis(tokens, jnp.clip(jnp.broadcast_to(p - 1, (rows, length + 3)), 0, length - 1), axis=1)
    b = jnp.take_along_axis(other, jnp.clip(p - 2 - size_a + start_b, 0, length - 1), axis=1)
    end_a, end_b = 1 + size_a, 2 + size_a + size_b
    ids = jnp.select([p == 0, p < end_a, p == end_a, p < end_b, p == end_b], [cls, a, sep, b, sep], pad)
    real = (p <= end_b) & (sizes[:, None] > 0)
    ids = jnp.where(real, ids, pad).astype(jnp.int32)
    return Pairs(
        input_ids=ids,
        token_type_ids=((p > end_a) & real).astype(jnp.int32),
        attention_mask=real.astype(jnp.int32),
        is_random=is_random.astype(jnp.int32),
        has_pair=has_pair.astype(jnp.int32),
    )


def single_segments(batch: TokenBatch, *, cls: int, sep: int, pad: int) -> Int[Array, "batch length_plus_2"]:
    """`[CLS] tokens [SEP]` rows, padded: int32 [batch, length + 2]. Empty rows stay empty."""
    tokens, segment_ids = jnp.asarray(batch.tokens), jnp.asarray(batch.segment_ids)
    rows, length = tokens.shape
    sizes = jnp.sum(segment_ids > 0, axis=1)[:, None]
    p = jnp.arange(length + 2)[None, :]
    text = jnp.take_along_axis(tokens, jnp.clip(jnp.broadcast_to(p - 1, (rows, length + 2)), 0, length - 1), axis=1)
    ids = jnp.select([p == 0, p <= sizes, p == sizes + 1], [cls, text, sep], pad)
    return jnp.where((p <= sizes + 1) & (sizes > 0), ids, pad).astype(jnp.int32)
