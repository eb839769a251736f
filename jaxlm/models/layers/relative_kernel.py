"""Pallas kernel of attention with relative positions and segments (XLNet), for TPUs.

A step of the grid has one head of one row of the batch. VMEM holds the scores of 128 queries and all keys, so that the
softmax needs no blocks of keys; no score is written to HBM. The backward pass computes the scores and draws the bits of
dropout again. Arrays are [batch, heads · head_dim, length]: heads of 64 would fill half of a TPU's 128 lanes, while
positions fill them all. In the kernel, scores are lists of tiles [128 queries, 128 keys or distances].
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jaxlm.models.layers.dropout import keep_scale
from jaxlm.models.layers.kernel_tools import HIDDEN, LANES, VMEM, dot, kept_elements

TILE = LANES
"""Queries, keys and distances of a tile of scores."""
MOST_DISTANCES = 2048
"""Limit of the number of distances. The kernel's code, and the time to compile it, grow with the number of tiles."""

Tiles = list[jax.Array]


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
    output, normalizer = _call(
        _forward_kernel, (2, 1), specs, [specs[0], _by_head(by_row)], (query, by_row), [], rate, is_content, seeds,
        is_backward, *arrays,
    )
    output, normalizer = (checkpoint_name(x, "attention") for x in (output, normalizer))
    return output, (*arrays, is_backward, seeds, output, normalizer)


def _backward(rate, is_content, saved, gradient):
    *arrays, is_backward, seeds, output, normalizer = saved
    query, _, key, _, distance, segment_scores, *_ = arrays
    specs = _specs(arrays)
    width = key.shape[1] // seeds.shape[1]
    both = pl.BlockSpec((2, width, distance.shape[2]), lambda head, row, *_: (0, head, 0))
    sums = pltpu.VMEM((width, key.shape[2]), jnp.float32)
    *gradients, d_distance, d_segment = _call(
        _backward_kernel, (5, 3), [*specs, specs[0], _by_head(normalizer), specs[0]], [*specs[:4], both, specs[5]],
        (query, query, key, key, jax.ShapeDtypeStruct(distance.shape, jnp.float32), segment_scores), [sums, sums],
        rate, is_content, seeds, is_backward, *arrays, output, normalizer, gradient,
    )
    return *gradients, d_distance.astype(distance.dtype), d_segment, None, None, None, None


relative_attention.defvjp(_forward, _backward)


def _specs(arrays: list[jax.Array]) -> list[pl.BlockSpec]:
    """Return the blocks of the first eight arguments of `relative_attention` in the grid (heads, batch)."""
    query, _, key, _, distance, segment_scores, *vectors = arrays
    width = query.shape[1] // segment_scores.shape[1]
    q, kv = (pl.BlockSpec((1, width, x.shape[2]), lambda head, row, *_: (row, head, 0)) for x in (query, key))
    # Of the vectors of distances, a row reads those of its direction.
    own = pl.BlockSpec((1, width, distance.shape[2]), lambda head, row, _, is_backward: (is_backward[row], head, 0))
    vectors = [pl.BlockSpec((1, *x.shape[1:]), lambda head, row, *_: (row, 0, 0)) for x in vectors]
    return [q, q, kv, kv, own, _by_head(segment_scores), *vectors]


def _by_head(x: Any) -> pl.BlockSpec:
    """Return the blocks of an array [batch, heads, …, queries]."""
    return pl.BlockSpec((1, 1, *x.shape[2:]), lambda head, row, *_: (row, head, 0, 0))


def _call(kernel, products, in_specs, out_specs, shapes, scratch, rate, is_content, seeds, *arrays):
    """Run a kernel whose numbers of products with keys and with distances are `products`, for its cost estimate."""
    batch, heads = seeds.shape
    _, query, _, key, _, distance = arrays[:6]
    keys, distances = key.shape[2], distance.shape[2]
    # The queries of a tile of the content stream have neighbouring positions, and so few distances.
    window = keys + TILE if is_content else distances
    flops = 2 * batch * query.shape[1] * query.shape[2] * (products[0] * keys + products[1] * window)
    return pl.pallas_call(
        functools.partial(kernel, rate=rate, is_content=is_content),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2, grid=(heads, batch), in_specs=in_specs, out_specs=out_specs, scratch_shapes=scratch
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in shapes],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM),
        cost_estimate=pl.CostEstimate(
            flops=flops, transcendentals=batch * heads * query.shape[2] * keys,
            bytes_accessed=sum(x.nbytes for x in arrays) + sum(x.size * x.dtype.itemsize for x in shapes),
        ),
        name=f"relative_attention{kernel.__name__.removesuffix('_kernel')}",
    )(seeds, *arrays)


class _Window(NamedTuple):
    """The distances of a tile of queries, and how far they lie from the keys: a number of tiles and of lanes."""

    first: int
    """First tile of distances."""
    count: int
    """Number of tiles of distances."""
    moves: list[tuple[int, jax.Array]]
    """Numbers of tiles, and which queries [128, 1] pass over them."""
    lanes: jax.Array
    """Lanes that the queries [128, 1] pass over after those tiles, 1 to 128."""

    @classmethod
    def of(cls, block: int, positions: jax.Array, length: int, distances: int, is_content: bool) -> _Window:
        """Return the window of the queries in block `block`. The keys of position i begin at distance length - i."""
        if is_content:
            lanes = TILE - jax.lax.broadcasted_iota(jnp.int32, (TILE, 1), 0)
            return cls(length // TILE - block - 1, (distances - length) // TILE + 1, [], lanes)
        # Shifts and masks divide by TILE; integer division of vectors is slow.
        lanes, most, moves = length - 1 - positions, length // TILE - 1, []
        passed = lanes >> (TILE.bit_length() - 1)
        while most:
            step = (most + 1) // 2
            move = passed >= step
            moves.append((step, move))
            passed, most = jnp.where(move, passed - step, passed), most - step
        return cls(0, distances // TILE, moves, 1 + (lanes & (TILE - 1)))

    def to_keys(self, tiles: Tiles) -> Tiles:
        """Select the scores of the keys from those of the distances."""
        for step, move in self.moves:
            tiles = [jnp.where(move, b, a) for a, b in zip(tiles[:-step], tiles[step:], strict=True)]
        lane = _lane() + self.lanes
        tiles = [_rotate(x, lane) for x in tiles]
        return [jnp.where(lane < TILE, a, b) for a, b in itertools.pairwise(tiles)]

    def to_distances(self, tiles: Tiles) -> Tiles:
        """Move the gradients of the keys' scores to their distances: the transpose of `to_keys`."""
        zero, lane = jnp.zeros((TILE, TILE), jnp.float32), _lane() - self.lanes
        tiles = [_rotate(x, lane) for x in tiles]
        tiles = [jnp.where(lane < 0, a, b) for a, b in zip([zero, *tiles], [*tiles, zero], strict=True)]
        for step, move in self.moves:
            zeros = [zero] * step
            tiles = [jnp.where(move, b, a) for a, b in zip(tiles + zeros, zeros + tiles, strict=True)]
        return tiles


def _forward_kernel(seeds, _, q_ref, qd_ref, k_ref, v_ref, r_ref, segment_ref, q_vectors, k_vectors, out_ref,
                    normalizer_ref, *, rate, is_content):
    for block in range(q_ref.shape[2] // TILE):
        queries = _tile(block)
        scores, _, _ = _scores(block, q_ref, qd_ref, k_ref, r_ref, segment_ref, q_vectors, k_vectors, is_content)
        top = jnp.max(functools.reduce(jnp.maximum, scores), axis=1, keepdims=True)
        exponentials = [jnp.exp(x - top) for x in scores]
        total = jnp.sum(_sum(exponentials), axis=1, keepdims=True)
        (kept,) = _drop([exponentials], seeds, block, rate)
        out = _sum(dot(v_ref[0, :, _tile(i)], x.astype(v_ref.dtype), (1, 1)) for i, x in enumerate(kept))
        top, total = _as_rows(top, total)
        out_ref[0, :, queries] = (out * (keep_scale(rate) / total)).astype(out_ref.dtype)
        # Without visible keys the backward pass gets probabilities of 0.
        normalizer_ref[0, 0, :, queries] = jnp.where(top > HIDDEN, top + jnp.log(total), -HIDDEN)


def _backward_kernel(seeds, is_backward, q_ref, qd_ref, k_ref, v_ref, r_ref, segment_ref, q_vectors, k_vectors, out_ref,
                     normalizer_ref, do_ref, dq_ref, dqd_ref, dk_ref, dv_ref, dr_ref, d_segment_ref, dk_sum, dv_sum, *,
                     rate, is_content):
    row, factor = pl.program_id(1), keep_scale(rate)

    @pl.when(row == 0)
    def _():
        dr_ref[...] = jnp.zeros_like(dr_ref)

    dk_sum[...], dv_sum[...] = jnp.zeros_like(dk_sum), jnp.zeros_like(dv_sum)
    for block in range(q_ref.shape[2] // TILE):
        queries = _tile(block)
        scores, others, window = _scores(
            block, q_ref, qd_ref, k_ref, r_ref, segment_ref, q_vectors, k_vectors, is_content
        )
        q, qd, do = (ref[0, :, queries] for ref in (q_ref, qd_ref, do_ref))
        # Σ_k p · dp of the softmax's gradient, from the output instead of the scores. All gradients lack `factor`.
        row_sum = jnp.sum(do.astype(jnp.float32) * out_ref[0, :, queries].astype(jnp.float32), axis=0, keepdims=True)
        normalizer, row_sum = _as_columns(normalizer_ref[0, 0, :, queries], row_sum / factor)
        probabilities = [jnp.exp(x - normalizer) for x in scores]
        d_probabilities = [dot(do, v_ref[0, :, _tile(i)], (0, 0)) for i in range(len(scores))]
        kept, d_probabilities = _drop([probabilities, d_probabilities], seeds, block, rate)
        d_scores = [p * (dp - row_sum) for p, dp in zip(probabilities, d_probabilities, strict=True)]
        dq, dqd = [], []
        for i, (p, ds) in enumerate(zip(kept, d_scores, strict=True)):
            p, ds, keys = p.astype(do.dtype), ds.astype(do.dtype), _tile(i)
            dv_sum[:, keys] += dot(do, p, (1, 0))
            dk_sum[:, keys] += dot(q, ds, (1, 0))
            dq.append(dot(k_ref[0, :, keys], ds, (1, 1)))
        for i, ds in enumerate(window.to_distances(d_scores), window.first):
            ds, distances = ds.astype(do.dtype), _tile(i)
            dr_ref[is_backward[row], :, distances] += dot(qd, ds, (1, 0)) * factor
            dqd.append(dot(r_ref[0, :, distances], ds, (1, 1)))
        dq_ref[0, :, queries] = (_sum(dq) * factor).astype(dq_ref.dtype)
        dqd_ref[0, :, queries] = (_sum(dqd) * factor).astype(dqd_ref.dtype)
        other = _sum(jnp.where(is_other, ds, 0.0) for is_other, ds in zip(others, d_scores, strict=True))
        same = _sum(d_scores) - other
        sums = _as_rows(*(jnp.sum(x, axis=1, keepdims=True) for x in (same, other)))
        d_segment_ref[0, 0, :, queries] = jnp.concatenate(sums, axis=0) * factor
    dk_ref[0] = (dk_sum[...] * factor).astype(dk_ref.dtype)
    dv_ref[0] = (dv_sum[...] * factor).astype(dv_ref.dtype)


def _scores(block, q_ref, qd_ref, k_ref, r_ref, segment_ref, q_vectors, k_vectors, is_content):
    """Return the scores of 128 queries, whether their keys are of another segment, and the window of distances."""
    queries, tiles = _tile(block), k_ref.shape[2] // TILE
    length = r_ref.shape[2] - k_ref.shape[2]
    positions, segments, limits = _as_columns(*(q_vectors[0, i : i + 1, queries] for i in range(3)))
    same, other = _as_columns(*(segment_ref[0, 0, i : i + 1, queries] for i in range(2)))
    window = _Window.of(block, positions, length, r_ref.shape[2], is_content)
    q, qd = q_ref[0, :, queries], qd_ref[0, :, queries]
    by_distance = [dot(qd, r_ref[0, :, _tile(window.first + i)], (0, 0)) for i in range(window.count)]
    scores, others = [], []
    for i, x in enumerate(window.to_keys(by_distance)):
        is_other = k_vectors[0, 0:1, _tile(i)] != segments
        visible = k_vectors[0, 1:2, _tile(i)] < limits
        if is_content and i == tiles - length // TILE + block:
            visible |= _lane() == jax.lax.broadcasted_iota(jnp.int32, (TILE, TILE), 0)
        x += dot(q, k_ref[0, :, _tile(i)], (0, 0)) + jnp.where(is_other, other, same)
        scores.append(jnp.where(visible, x, HIDDEN))
        others.append(is_other)
    return scores, others, window


def _drop(arrays: list[Tiles], seeds: Any, block: int, rate: float) -> list[Tiles]:
    """Set the same elements, which dropout drops, to 0 in all arrays."""
    if rate <= 0.0:
        return arrays
    seed = seeds[pl.program_id(1), pl.program_id(0)]
    keep = kept_elements(seed, block, (TILE, TILE * len(arrays[0])), rate)
    return [[jnp.where(keep[:, _tile(i)], x, 0.0) for i, x in enumerate(tiles)] for tiles in arrays]


def _sum(arrays: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, arrays)


def _tile(index: int) -> slice:
    return slice(index * TILE, (index + 1) * TILE)


def _lane() -> Int[Array, "128 128"]:
    return jax.lax.broadcasted_iota(jnp.int32, (TILE, TILE), 1)


def _rotate(x: Float[Array, "128 128"], lane: Int[Array, "128 128"]) -> Float[Array, "128 128"]:
    """Return the elements of each row in the lanes `lane` mod 128."""
    return jnp.take_along_axis(x, lane & (TILE - 1), axis=1, mode="promise_in_bounds")


def _as_columns(*rows: jax.Array) -> list[jax.Array]:
    """Turn vectors [1, 128] into columns [128, 1]."""
    columns = jnp.concatenate(rows, axis=0).T
    return [columns[:, i : i + 1] for i in range(len(rows))]


def _as_rows(*columns: jax.Array) -> list[jax.Array]:
    """Turn columns [128, 1] into vectors [1, 128]."""
    x = jnp.broadcast_to(columns[0], (TILE, TILE))
    for i, column in enumerate(columns[1:], 1):
        x = jnp.where(_lane() == i, column, x)
    rows = x.T
    return [rows[i : i + 1] for i in range(len(columns))]
