"""Pallas kernel of disentangled attention (DeBERTa), for TPUs.

A step of the grid has one head of one row of the batch. Scores of position to content come first, for 128 keys at a
time: they are computed by distance, shifted to the queries, transposed, and kept in VMEM for all queries. Then each 128
queries (tiles.py) add their scores of content, and those of content to position, shifted to the keys. The backward pass
computes the scores and draws the bits of dropout again. Arrays are [batch, heads · head_dim, length].
"""

from __future__ import annotations

import functools
from typing import Any

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
    Tiles,
    Window,
    as_columns,
    head_block,
    query_block,
    row_block,
    run_kernel,
    score_gradients,
    tile,
    write_output,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def disentangled_attention(
    query: Float[Array, "batch width length"],
    key: Float[Array, "batch width length"],
    value: Float[Array, "batch width length"],
    distance_query: Float[Array, "1 width distances"],
    distance_key: Float[Array, "1 width distances"],
    segments: Int[Array, "batch 2 length"],
    seeds: Int[Array, "batch heads"],
    rate: float,
) -> Float[Array, "batch width length"]:
    """Return softmax(q_i · k_j + q_i · distance_key[i - j] + k_j · distance_query[i - j]) v, the softmax in float32.

    A query without visible keys gets a finite, meaningless result and has no gradients.

    `width` is heads · head_dim, the length a multiple of 128, and the number of distances twice the length.

    Args:
        query: Queries; they contain the factor on the scores.
        key: Keys.
        value: Values.
        distance_query: Queries of the distances -length, …, length - 1, with the factor on the scores. They are in the
            opposite order of `distance_key`, since from a key the distances of the queries have the other sign.
        distance_key: Keys of the distances length, …, 1 - length.
        segments: int32; segment of each token as a query and as a key. A query attends to the keys of its segment.
        seeds: int32, seeds of dropout.
        rate: Dropout rate of the probabilities.
    """
    return _forward(query, key, value, distance_query, distance_key, segments, seeds, rate)[0]


def _forward(*arguments):
    *arrays, seeds, rate = arguments
    query, by_row = arrays[0], jax.ShapeDtypeStruct((*seeds.shape, 1, arrays[0].shape[2]), jnp.float32)
    specs, scratch = _blocks(arrays, seeds)
    output, normalizer = run_kernel(
        "disentangled_attention_forward", functools.partial(_forward_kernel, rate=rate), [seeds], arrays, specs,
        [query, by_row], [specs[0], query_block(by_row)], [scratch], _flops(query, 2, 2),
    )
    output, normalizer = (checkpoint_name(x, "attention") for x in (output, normalizer))
    return output, (*arrays, seeds, output, normalizer)


def _backward(rate, saved, gradient):
    *arrays, seeds, output, normalizer = saved
    query, _, _, distances, *_ = arrays
    specs, scratch = _blocks(arrays, seeds)
    own, every = specs[0], specs[3]
    distance_sums = jax.ShapeDtypeStruct(distances.shape, jnp.float32)
    key_sums = pltpu.VMEM(own.block_shape[1:], jnp.float32)
    *d_distances, dq, dk, dv = run_kernel(
        "disentangled_attention_backward", functools.partial(_backward_kernel, rate=rate), [seeds],
        [*arrays, output, normalizer, gradient], [*specs, own, query_block(normalizer), own],
        [distance_sums, distance_sums, query, query, query], [every, every, own, own, own],
        [scratch, key_sums, key_sums], _flops(query, 5, 6),
    )
    return dq, dk, dv, *(x.astype(distances.dtype) for x in d_distances), None, None


disentangled_attention.defvjp(_forward, _backward)


def _blocks(arrays: list[jax.Array], seeds: jax.Array) -> tuple[list[pl.BlockSpec], Any]:
    """Return the blocks of the first six arguments of `disentangled_attention`, and the memory of position scores."""
    query, _, _, distances, _, segments = arrays
    width, length = query.shape[1] // seeds.shape[1], query.shape[2]
    own, every = head_block(query, width), pl.BlockSpec((1, width, distances.shape[2]), lambda head, *_: (0, head, 0))
    return [own, own, own, every, every, row_block(segments)], pltpu.VMEM((length, length), jnp.float32)


def _flops(query: jax.Array, by_key: int, by_distance: int) -> int:
    """Return the FLOPs of a kernel with these numbers of products with the keys and with the distances."""
    length = query.shape[2]
    # A tile of queries or keys has neighbouring positions, and so few distances.
    return 2 * query.size * (by_key * length + by_distance * (length + TILE))


def _forward_kernel(seeds, q_ref, k_ref, v_ref, rq_ref, rk_ref, segments, out_ref, normalizer_ref, position_scores, *,
                    rate):
    _position_scores(k_ref, rq_ref, position_scores)
    for block in range(q_ref.shape[2] // TILE):
        scores, _ = _scores(block, q_ref, k_ref, rk_ref, segments, position_scores)
        write_output(block, scores, v_ref, out_ref, normalizer_ref, seeds, rate)


def _backward_kernel(seeds, q_ref, k_ref, v_ref, rq_ref, rk_ref, segments, out_ref, normalizer_ref, do_ref,
                     drq_ref, drk_ref, dq_ref, dk_ref, dv_ref, position_scores, dk_sum, dv_sum, *, rate):
    length, factor = q_ref.shape[2], keep_scale(rate)

    @pl.when(pl.program_id(1) == 0)
    def _():
        drq_ref[...], drk_ref[...] = jnp.zeros_like(drq_ref), jnp.zeros_like(drk_ref)

    dk_sum[...], dv_sum[...] = jnp.zeros_like(dk_sum), jnp.zeros_like(dv_sum)
    _position_scores(k_ref, rq_ref, position_scores)
    blocks = range(length // TILE)
    for block in blocks:
        queries = tile(block)
        scores, window = _scores(block, q_ref, k_ref, rk_ref, segments, position_scores)
        d_scores, dq = score_gradients(
            block, scores, q_ref, k_ref, v_ref, out_ref, normalizer_ref, do_ref, dk_sum, dv_sum, seeds, rate
        )
        dq += window.add_gradients(d_scores, q_ref[0, :, queries], rk_ref, drk_ref, 0, factor)
        dq_ref[0, :, queries] = (dq * factor).astype(dq_ref.dtype)
        # These scores are not read again; their gradients take their place for the loop below.
        for i, ds in enumerate(d_scores):
            position_scores[queries, tile(i)] = ds
    for block in blocks:
        keys = tile(block)
        d_scores = [position_scores[tile(i), keys].T for i in blocks]
        window = Window.in_order(block, length, 2 * length)
        dk_sum[:, keys] += window.add_gradients(d_scores, k_ref[0, :, keys], rq_ref, drq_ref, 0, factor)
    dk_ref[0] = (dk_sum[...] * factor).astype(dk_ref.dtype)
    dv_ref[0] = (dv_sum[...] * factor).astype(dv_ref.dtype)


def _position_scores(k_ref: Any, rq_ref: Any, position_scores: Any) -> None:
    """Write the scores of position to content, [queries, keys]."""
    length = k_ref.shape[2]
    for block in range(length // TILE):
        window = Window.in_order(block, length, 2 * length)
        for i, x in enumerate(window.scores(k_ref[0, :, tile(block)], rq_ref)):
            position_scores[tile(i), tile(block)] = x.T


def _scores(
    block: int, q_ref: Any, k_ref: Any, rk_ref: Any, segments: Any, position_scores: Any
) -> tuple[Tiles, Window]:
    """Return the scores of 128 queries, and their window of distances."""
    queries, length = tile(block), q_ref.shape[2]
    q, window, scores = q_ref[0, :, queries], Window.in_order(block, length, 2 * length), []
    (own,) = as_columns(segments[0, 0:1, queries])
    for i, x in enumerate(window.scores(q, rk_ref)):
        x += dot(q, k_ref[0, :, tile(i)], (0, 0)) + position_scores[queries, tile(i)]
        scores.append(jnp.where(segments[0, 1:2, tile(i)] == own, x, HIDDEN))
    return scores, window
