"""Pallas kernel of attention with relative positions and segments (XLNet), for TPUs.

A step of the grid has one head of one row of the batch. VMEM holds the scores of 128 queries and all keys (tiles.py),
so that the softmax needs no blocks of keys; no score is written to HBM. The backward pass computes the scores and draws
the bits of dropout again. Arrays are [batch, heads · head_dim, length].
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jaxlm.models.layers.dropout import keep_scale
from jaxlm.models.layers.kernel_tools import HIDDEN, dot
from jaxlm.models.layers.tiles import (
    TILE,
    Window,
    add,
    as_columns,
    as_rows,
    head_block,
    lane,
    query_block,
    row_block,
    run_kernel,
    score_gradients,
    tile,
    write_output,
)

MOST_DISTANCES = 2048
"""Limit of the number of distances. The kernel's code, and the time to compile it, grow with the number of tiles."""


def fits(length: int, keys: int, head_dim: int, dtype: str) -> bool:
    """Return whether the kernel supports a text of this length, and keys of the memory and the text together."""
    aligned = length % TILE == 0 and keys % TILE == 0 and head_dim % 16 == 0
    return aligned and dtype == "bfloat16" and length + keys <= MOST_DISTANCES


@functools.partial(jax.custom_vjp, nondiff_argnums=(10, 11))
def relative_attention(
    content_query: Float[Array, "batch width queries"],
    distance_query: Float[Array, "batch width queries"],
    key: Float[Array, "batch width keys"],
    value: Float[Array, "batch width keys"],
    distance: Float[Array, "2 width distances"],
    segment_scores: Float[Array, "batch heads 2 queries"],
    query_vectors: Int[Array, "batch 3 queries"],
    key_vectors: Int[Array, "batch 2 keys"],
    is_backward: Int[Array, " batch"],
    seeds: Int[Array, "batch heads"],
    rate: float,
    is_content: bool,
) -> Float[Array, "batch width queries"]:
    """Return softmax(content score + distance score + segment score) v, with the softmax in float32.

    A query without visible keys gets a finite, meaningless result and has no gradients.

    The text is the last `distances - keys` keys; a memory comes before it. `width` is heads · head_dim, and the numbers
    of queries, keys and distances are multiples of 128.

    Args:
        content_query: Queries that are multiplied with the keys; they contain the factor on the scores.
        distance_query: Queries that are multiplied with the vectors of distances, with the same factor.
        key: Keys.
        value: Values.
        distance: Vectors of the distances keys, …, 1 - length, and of the negative ones for reversed text.
        segment_scores: Scores of the keys of the query's segment and of those of another one, float32.
        query_vectors: int32; position in the text (ignored with `is_content`), segment and limit of each query.
        key_vectors: int32; segment and rank of each key. A query attends to the keys whose rank is below its limit.
        is_backward: 1 in rows whose text is reversed.
        seeds: int32, seeds of dropout.
        rate: Dropout rate of the probabilities.
        is_content: Whether the queries are the tokens of the text, in order. Each of them also attends to itself.
    """
    arguments = (content_query, distance_query, key, value, distance, segment_scores, query_vectors, key_vectors)
    return _forward(*arguments, is_backward, seeds, rate, is_content)[0]


def _forward(*arguments):
    *arrays, is_backward, seeds, rate, is_content = arguments
    query, by_row = arrays[0], jax.ShapeDtypeStruct((*seeds.shape, 1, arrays[0].shape[2]), jnp.float32)
    specs = _specs(arrays)
    output, normalizer = run_kernel(
        "relative_attention_forward", functools.partial(_forward_kernel, rate=rate, is_content=is_content),
        [seeds, is_backward], arrays, specs, [query, by_row], [specs[0], query_block(by_row)], [],
        _flops(arrays, 2, 1, is_content),
    )
    output, normalizer = (checkpoint_name(x, "attention") for x in (output, normalizer))
    return output, (*arrays, is_backward, seeds, output, normalizer)


def _backward(rate, is_content, saved, gradient):
    *arrays, is_backward, seeds, output, normalizer = saved
    query, _, key, _, distance, segment_scores, *_ = arrays
    specs, width = _specs(arrays), key.shape[1] // seeds.shape[1]
    distance_sums = jax.ShapeDtypeStruct(distance.shape, jnp.float32)
    both_directions = pl.BlockSpec((2, width, distance.shape[2]), lambda head, row, *_: (0, head, 0))
    key_sums = pltpu.VMEM((width, key.shape[2]), jnp.float32)
    *gradients, d_distance, d_segment = run_kernel(
        "relative_attention_backward", functools.partial(_backward_kernel, rate=rate, is_content=is_content),
        [seeds, is_backward], [*arrays, output, normalizer, gradient],
        [*specs, specs[0], query_block(normalizer), specs[0]], [query, query, key, key, distance_sums, segment_scores],
        [*specs[:4], both_directions, specs[5]], [key_sums, key_sums], _flops(arrays, 5, 3, is_content),
    )
    return *gradients, d_distance.astype(distance.dtype), d_segment, None, None, None, None


relative_attention.defvjp(_forward, _backward)


def _specs(arrays: list[jax.Array]) -> list[pl.BlockSpec]:
    """Return the blocks of the first eight arguments of `relative_attention`."""
    query, _, key, _, distance, segment_scores, *vectors = arrays
    width = query.shape[1] // segment_scores.shape[1]
    q, kv = head_block(query, width), head_block(key, width)
    # Of the vectors of distances, a row reads those of its direction.
    own = pl.BlockSpec((1, width, distance.shape[2]), lambda head, row, _, is_backward: (is_backward[row], head, 0))
    return [q, q, kv, kv, own, query_block(segment_scores), *map(row_block, vectors)]


def _flops(arrays: list[jax.Array], by_key: int, by_distance: int, is_content: bool) -> int:
    """Return the FLOPs of a kernel with these numbers of products with the keys and with the distances."""
    query, _, key, _, distance, *_ = arrays
    keys, distances = key.shape[2], distance.shape[2]
    # The queries of a tile of the content stream have neighbouring positions, and so few distances.
    return 2 * query.size * (by_key * keys + by_distance * (keys + TILE if is_content else distances))


def _forward_kernel(seeds, _, q_ref, qd_ref, k_ref, v_ref, r_ref, segment_ref, q_vectors, k_vectors, out_ref,
                    normalizer_ref, *, rate, is_content):
    for block in range(q_ref.shape[2] // TILE):
        scores, _, _ = _scores(block, q_ref, qd_ref, k_ref, r_ref, segment_ref, q_vectors, k_vectors, is_content)
        write_output(block, scores, v_ref, out_ref, normalizer_ref, seeds, rate)


def _backward_kernel(seeds, is_backward, q_ref, qd_ref, k_ref, v_ref, r_ref, segment_ref, q_vectors, k_vectors, out_ref,
                     normalizer_ref, do_ref, dq_ref, dqd_ref, dk_ref, dv_ref, dr_ref, d_segment_ref, dk_sum, dv_sum, *,
                     rate, is_content):
    row, factor = pl.program_id(1), keep_scale(rate)

    @pl.when(row == 0)
    def _():
        dr_ref[...] = jnp.zeros_like(dr_ref)

    dk_sum[...], dv_sum[...] = jnp.zeros_like(dk_sum), jnp.zeros_like(dv_sum)
    for block in range(q_ref.shape[2] // TILE):
        queries = tile(block)
        scores, others, window = _scores(
            block, q_ref, qd_ref, k_ref, r_ref, segment_ref, q_vectors, k_vectors, is_content
        )
        d_scores, dq = score_gradients(
            block, scores, q_ref, k_ref, v_ref, out_ref, normalizer_ref, do_ref, dk_sum, dv_sum, seeds, rate
        )
        dqd = window.add_gradients(d_scores, qd_ref[0, :, queries], r_ref, dr_ref, is_backward[row], factor)
        dq_ref[0, :, queries] = (dq * factor).astype(dq_ref.dtype)
        dqd_ref[0, :, queries] = (dqd * factor).astype(dqd_ref.dtype)
        other = add(jnp.where(is_other, ds, 0.0) for is_other, ds in zip(others, d_scores, strict=True))
        same = add(d_scores) - other
        sums = as_rows(*(jnp.sum(x, axis=1, keepdims=True) for x in (same, other)))
        d_segment_ref[0, 0, :, queries] = jnp.concatenate(sums, axis=0) * factor
    dk_ref[0] = (dk_sum[...] * factor).astype(dk_ref.dtype)
    dv_ref[0] = (dv_sum[...] * factor).astype(dv_ref.dtype)


def _scores(block, q_ref, qd_ref, k_ref, r_ref, segment_ref, q_vectors, k_vectors, is_content):
    """Return the scores of 128 queries, whether their keys are of another segment, and the window of distances."""
    queries, tiles, distances = tile(block), k_ref.shape[2] // TILE, r_ref.shape[2]
    length = distances - k_ref.shape[2]
    positions, segments, limits = as_columns(*(q_vectors[0, i : i + 1, queries] for i in range(3)))
    same, other = as_columns(*(segment_ref[0, 0, i : i + 1, queries] for i in range(2)))
    window = Window.in_order(block, length, distances) if is_content else Window.at(positions, length, distances)
    scores, others, q = [], [], q_ref[0, :, queries]
    for i, x in enumerate(window.scores(qd_ref[0, :, queries], r_ref)):
        is_other = k_vectors[0, 0:1, tile(i)] != segments
        visible = k_vectors[0, 1:2, tile(i)] < limits
        if is_content and i == tiles - length // TILE + block:
            visible |= lane() == jax.lax.broadcasted_iota(jnp.int32, (TILE, TILE), 0)
        x += dot(q, k_ref[0, :, tile(i)], (0, 0)) + jnp.where(is_other, other, same)
        scores.append(jnp.where(visible, x, HIDDEN))
        others.append(is_other)
    return scores, others, window
