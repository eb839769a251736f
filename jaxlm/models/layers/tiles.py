"""Tiles of attention scores in Pallas kernels for TPUs, and their shift from distances to keys.

The kernels of relative attention hold the scores of 128 queries as a list of tiles [128 queries, 128 keys or
distances] in float32. Their other arrays are [head_dim, length]: heads of 64 would fill half of a TPU's 128 lanes,
while positions fill them all. The grid is (heads, batch).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jaxlm.models.layers.dropout import keep_scale
from jaxlm.models.layers.kernel_tools import HIDDEN, LANES, VMEM, dot, kept_elements

TILE = LANES
"""Queries, keys and distances of a tile."""

Tiles = list[jax.Array]


class Window(NamedTuple):
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
    def in_order(cls, block: int, length: int, distances: int) -> Window:
        """Return the window of the consecutive queries in block `block` of the text: that of the keys, and a tile.

        The keys of position i begin at distance length - i.
        """
        lanes = TILE - jax.lax.broadcasted_iota(jnp.int32, (TILE, 1), 0)
        return cls(length // TILE - block - 1, (distances - length) // TILE + 1, [], lanes)

    @classmethod
    def at(cls, positions: Int[Array, "128 1"], length: int, distances: int) -> Window:
        """Return the window of queries at any positions of the text: all distances."""
        # Shifts and masks divide by TILE; integer division of vectors is slow.
        lanes, most, moves = length - 1 - positions, length // TILE - 1, []
        passed = lanes >> (TILE.bit_length() - 1)
        while most:
            step = (most + 1) // 2
            move = passed >= step
            moves.append((step, move))
            passed, most = jnp.where(move, passed - step, passed), most - step
        return cls(0, distances // TILE, moves, 1 + (lanes & (TILE - 1)))

    def scores(self, query: Float[Array, "head_dim 128"], distance_ref: Any) -> Tiles:
        """Return the scores of the keys by their distances, whose vectors are [1, head_dim, distances]."""
        return self.to_keys(
            [dot(query, distance_ref[0, :, tile(self.first + i)], (0, 0)) for i in range(self.count)]
        )

    def add_gradients(
        self, d_scores: Tiles, query: Float[Array, "head_dim 128"], distance_ref: Any, sum_ref: Any, row: Any,
        factor: float,
    ) -> Float[Array, "head_dim 128"]:
        """Return the gradient of the queries, which lacks `factor`; add that of the distances to `sum_ref[row]`."""
        found = []
        for i, ds in enumerate(self.to_distances(d_scores), self.first):
            ds, distances = ds.astype(query.dtype), tile(i)
            sum_ref[row, :, distances] += dot(query, ds, (1, 0)) * factor
            found.append(dot(distance_ref[0, :, distances], ds, (1, 1)))
        return add(found)

    def to_keys(self, tiles: Tiles) -> Tiles:
        """Select the scores of the keys from those of the distances."""
        for step, move in self.moves:
            tiles = [jnp.where(move, b, a) for a, b in zip(tiles[:-step], tiles[step:], strict=True)]
        # Select first, then rotate, so that n tiles are rotated and not n + 1: lanes from `self.lanes` on come from the
        # earlier tile, the others from the later one.
        tiles = [jnp.where(lane() >= self.lanes, a, b) for a, b in itertools.pairwise(tiles)]
        return [rotate(x, lane() + self.lanes) for x in tiles]

    def to_distances(self, tiles: Tiles) -> Tiles:
        """Move the gradients of the keys' scores to their distances: the transpose of `to_keys`."""
        zero, at = jnp.zeros((TILE, TILE), jnp.float32), lane() - self.lanes
        tiles = [rotate(x, at) for x in tiles]
        tiles = [jnp.where(at < 0, a, b) for a, b in zip([zero, *tiles], [*tiles, zero], strict=True)]
        for step, move in self.moves:
            zeros = [zero] * step
            tiles = [jnp.where(move, b, a) for a, b in zip(tiles + zeros, zeros + tiles, strict=True)]
        return tiles


def head_block(x: Any, width: int) -> pl.BlockSpec:
    """Return the blocks of an array [batch, heads · width, length]: one head of one row."""
    return pl.BlockSpec((1, width, x.shape[2]), lambda head, row, *_: (row, head, 0))


def query_block(x: Any) -> pl.BlockSpec:
    """Return the blocks of an array [batch, heads, …, queries]: one head of one row."""
    return pl.BlockSpec((1, 1, *x.shape[2:]), lambda head, row, *_: (row, head, 0, 0))


def row_block(x: Any) -> pl.BlockSpec:
    """Return the blocks of an array [batch, vectors, length], which all heads read: one row."""
    return pl.BlockSpec((1, *x.shape[1:]), lambda head, row, *_: (row, 0, 0))


def run_kernel(
    name: str, kernel: Callable, scalars: list[jax.Array], inputs: list[jax.Array], in_specs: list[pl.BlockSpec],
    shapes: list[Any], out_specs: list[pl.BlockSpec], scratch: list[Any], flops: int,
) -> Sequence[jax.Array]:
    """Run a kernel over the grid (heads, batch).

    Args:
        name: Name in profiles and plans.
        kernel: Function of the references of scalars, inputs, results and scratch.
        scalars: Arrays in scalar memory; the first has the seeds of dropout [batch, heads].
        inputs: Inputs; the first are the queries [batch, width, queries], the third the keys.
        in_specs: Blocks of the inputs.
        shapes: Arrays that have the shapes and types of the results.
        out_specs: Blocks of the results.
        scratch: Vector memory that a step keeps its sums in.
        flops: FLOPs of the matrix products.
    """
    batch, heads = scalars[0].shape
    arrays = [*inputs, *shapes]
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars), grid=(heads, batch), in_specs=in_specs, out_specs=out_specs,
            scratch_shapes=scratch,
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in shapes],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM),
        cost_estimate=pl.CostEstimate(
            flops=flops, transcendentals=batch * heads * inputs[0].shape[2] * inputs[2].shape[2],
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays),
        ),
        name=name,
    )(*scalars, *inputs)


def write_output(
    block: int, scores: Tiles, v_ref: Any, out_ref: Any, normalizer_ref: Any, seeds: Any, rate: float
) -> None:
    """Write the output of the queries in block `block`, and the logarithm of Σ exp(score), for the backward pass."""
    top = jnp.max(functools.reduce(jnp.maximum, scores), axis=1, keepdims=True)
    exponentials = [jnp.exp(x - top) for x in scores]
    total = jnp.sum(add(exponentials), axis=1, keepdims=True)
    (kept,) = drop([exponentials], seeds, block, rate)
    out = add(dot(v_ref[0, :, tile(i)], x.astype(v_ref.dtype), (1, 1)) for i, x in enumerate(kept))
    top, total = as_rows(top, total)
    out_ref[0, :, tile(block)] = (out * (keep_scale(rate) / total)).astype(out_ref.dtype)
    # Without visible keys the backward pass gets probabilities of 0.
    normalizer_ref[0, 0, :, tile(block)] = jnp.where(top > HIDDEN, top + jnp.log(total), -HIDDEN)


def score_gradients(
    block: int, scores: Tiles, q_ref: Any, k_ref: Any, v_ref: Any, out_ref: Any, normalizer_ref: Any, do_ref: Any,
    dk_sum: Any, dv_sum: Any, seeds: Any, rate: float,
) -> tuple[Tiles, Float[Array, "head_dim 128"]]:
    """Return the gradients of the scores, and of the queries by the keys; add those of keys and values to the sums.

    None of them is multiplied by `keep_scale` yet.
    """
    queries = tile(block)
    q, do = q_ref[0, :, queries], do_ref[0, :, queries]
    # Σ_k p · dp of the softmax's gradient, from the output instead of the scores.
    row_sum = jnp.sum(do.astype(jnp.float32) * out_ref[0, :, queries].astype(jnp.float32), axis=0, keepdims=True)
    normalizer, row_sum = as_columns(normalizer_ref[0, 0, :, queries], row_sum / keep_scale(rate))
    probabilities = [jnp.exp(x - normalizer) for x in scores]
    d_probabilities = [dot(do, v_ref[0, :, tile(i)], (0, 0)) for i in range(len(scores))]
    kept, d_probabilities = drop([probabilities, d_probabilities], seeds, block, rate)
    d_scores, dq = [p * (dp - row_sum) for p, dp in zip(probabilities, d_probabilities, strict=True)], []
    for i, (p, ds) in enumerate(zip(kept, d_scores, strict=True)):
        p, ds, keys = p.astype(do.dtype), ds.astype(do.dtype), tile(i)
        dv_sum[:, keys] += dot(do, p, (1, 0))
        dk_sum[:, keys] += dot(q, ds, (1, 0))
        dq.append(dot(k_ref[0, :, keys], ds, (1, 1)))
    return d_scores, add(dq)


def drop(arrays: list[Tiles], seeds: Any, block: int, rate: float) -> list[Tiles]:
    """Set the same elements, which dropout drops, to 0 in all arrays."""
    if rate <= 0.0:
        return arrays
    seed = seeds[pl.program_id(1), pl.program_id(0)]
    count = len(arrays[0])
    keep = [kept_elements(seed, block * TILE, i * TILE, (TILE, TILE), TILE * count, rate) for i in range(count)]
    return [[jnp.where(mask, x, 0.0) for mask, x in zip(keep, tiles, strict=True)] for tiles in arrays]


def add(arrays: Iterable[jax.Array]) -> jax.Array:
    """Return the sum of arrays."""
    return functools.reduce(jnp.add, arrays)


def tile(index: int) -> slice:
    """Return the positions of a tile."""
    return slice(index * TILE, (index + 1) * TILE)


def lane() -> Int[Array, "128 128"]:
    """Return the lane of each element."""
    return jax.lax.broadcasted_iota(jnp.int32, (TILE, TILE), 1)


def rotate(x: Float[Array, "128 128"], lanes: Int[Array, "128 128"]) -> Float[Array, "128 128"]:
    """Return the elements of each row in the lanes `lanes` mod 128."""
    return jnp.take_along_axis(x, lanes & (TILE - 1), axis=1, mode="promise_in_bounds")


def as_columns(*rows: jax.Array) -> list[jax.Array]:
    """Turn vectors [1, 128] into columns [128, 1]."""
    columns = jnp.concatenate(rows, axis=0).T
    return [columns[:, i : i + 1] for i in range(len(rows))]


def as_rows(*columns: jax.Array) -> list[jax.Array]:
    """Turn columns [128, 1] into vectors [1, 128]."""
    x = jnp.broadcast_to(columns[0], (TILE, TILE))
    for i, column in enumerate(columns[1:], 1):
        x = jnp.where(lane() == i, column, x)
    rows = x.T
    return [rows[i : i + 1] for i in range(len(columns))]
