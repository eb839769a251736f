"""Pallas kernel of attention for TPUs, with rotary positions, bias, and dropout of the probabilities.

VMEM holds the scores of a block of queries and all their keys, so that the softmax needs no blocks of keys. The
backward pass computes the scores and the mask of dropout again. Arrays keep their layout [batch, length, heads ·
head_dim]. A program of the grid handles one row and 128 columns. Heads narrower than that share a block: for each head
the columns of the others are set to zero, so that every product is 128 wide. In long rows they take turns, as a third
dimension of the grid.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from jaxlm.models.layers.dropout import keep_scale
from jaxlm.models.layers.kernel_tools import HIDDEN, LANES, VMEM, as_column, as_row, dot, kept_elements

LONGEST = 1024
"""Largest number of queries and of keys; twice as many with a causal mask, which skips half of the scores."""
MOST_SCORES = 2**22
"""Limit of queries · keys · (heads of a step)². The code is unrolled over heads and blocks of queries; the spills of
longer code do not fit into a v4."""
LONGEST_ROTATED = 1536
"""Largest number of queries that the kernel rotates by their positions: a v4's VMEM has no room for a longer table."""
MOST_BIASES = 2**19
"""Limit of the biases of all heads in a block. VMEM holds them and their gradients twice, in float32."""

Refs = dict[str, Any]
"""Blocks of the kernel's inputs or outputs in VMEM, by name."""


class Options(NamedTuple):
    """What a kernel is compiled for."""

    head_dim: int
    causal: bool = False
    """Whether later keys are masked; there are as many queries as keys."""
    band: int | None = None
    """Number of keys from its own position on, to either side, that a query attends to; None for all."""
    dropout_rate: float = 0.0

    @property
    def heads(self) -> int:
        """Number of heads in a block of columns."""
        return LANES // self.head_dim

    def heads_of_step(self, queries: int, keys: int) -> int:
        """Return how many of them a step of the grid computes: all or one."""
        return self.heads if self.heads**2 * queries * keys <= MOST_SCORES else 1


class AttentionInputs(NamedTuple):
    """Inputs of attention. `width` is heads · head_dim of this device; queries are scaled."""

    query: Float[Array, "batch queries width"]
    key: Float[Array, "batch keys width"]
    value: Float[Array, "batch keys width"]
    bias: Float[Array, "heads queries keys"] | None = None
    """Added to the scores."""
    query_segments: Int[Array, "batch 1 queries"] | None = None
    """Segment of each query, which attends only to keys of that segment; None to attend to all keys but padding."""
    key_segments: Int[Array, "batch 1 keys"] | None = None
    """Segment of each key; 0 is padding."""
    seeds: Int[Array, "batch heads"] | None = None
    """One random seed of dropout per row and head, so that the mask does not depend on the mesh."""
    rotation: Float[Array, "2 queries columns"] | None = None
    """Table of rotary positions for a block of columns (see `rotary.rotation_table`); there are as many queries as
    keys. None to leave queries and keys as they are."""


def fits(queries: int, keys: int, heads: int, head_dim: int, *, has_bias: bool, causal: bool) -> bool:
    """Return whether the kernel supports arrays of these sizes."""
    if queries % LANES or keys % LANES or LANES % head_dim or heads * head_dim % LANES or (causal and queries != keys):
        return False
    # Where heads take turns, the head is a dynamic index; Mosaic does not store at one in blocks of 128 queries.
    options = Options(head_dim)
    if queries % (2 * LANES) and options.heads_of_step(queries, keys) < options.heads:
        return False
    has_room = not has_bias or LANES // head_dim * queries * keys <= MOST_BIASES
    return has_room and max(queries, keys) <= (2 * LONGEST if causal else LONGEST)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def row_attention(rows: AttentionInputs, options: Options) -> Float[Array, "batch queries width"]:
    """Return softmax(q kᵀ + bias) v, with the softmax in float32 and dropout of its probabilities.

    A query without visible keys gets a finite, meaningless result and has no gradients.
    """
    return _forward(rows, options)[0]


def _forward(rows, options):
    batch, queries, width = rows.query.shape
    log_sums = jax.ShapeDtypeStruct((batch, width // LANES, options.heads, queries), jnp.float32)
    found = _call(_forward_kernel, 2, options, rows._asdict(), {"output": rows.query, "log_sums": log_sums})
    found = {name: checkpoint_name(array, "attention") for name, array in found.items()}
    return found["output"], (rows, found)


def _backward(options, saved, d_output):
    rows, found = saved
    shapes = {name: getattr(rows, name) for name in ("query", "key", "value")}
    if rows.bias is not None:
        shapes["bias"] = jax.ShapeDtypeStruct(rows.bias.shape, jnp.float32)
    sums = [pltpu.VMEM((rows.key.shape[1], LANES), jnp.float32)] * 2
    inputs = {**rows._asdict(), **found, "d_output": d_output}
    gradients = _call(_backward_kernel, 5, options, inputs, shapes, sums)
    return (AttentionInputs(**{name: gradients.get(name) for name in AttentionInputs._fields}),)


row_attention.defvjp(_forward, _backward)


def _call(
    kernel, products: int, options: Options, inputs: dict, outputs: dict, scratch: list | None = None
) -> dict[str, jax.Array]:
    """Run a kernel over the grid (blocks of columns, batch, steps of heads), which reads each bias once.

    `products` is the number of its products with arrays of scores, for the cost estimate.
    """
    inputs = {name: array for name, array in inputs.items() if array is not None}
    if "seeds" in inputs:
        inputs["seeds"] = inputs["seeds"].reshape(-1)  # scalar memory pads the last of two dimensions to 128
    batch, queries, width = inputs["query"].shape
    blocks = _blocks(queries, inputs["key"].shape[1], options)
    scores = sum((rows.stop - rows.start) * (keys.stop - keys.start) for rows, keys in blocks)
    arrays = [*inputs.values(), *outputs.values()]

    def spec(name: str, array: jax.Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
        if name == "seeds":
            return pl.BlockSpec(memory_space=pltpu.SMEM)
        if name == "bias":
            return pl.BlockSpec((options.heads, *array.shape[1:]), lambda column, row, _: (column, 0, 0))
        if name == "log_sums":
            return pl.BlockSpec((1, 1, *array.shape[2:]), lambda column, row, _: (row, column, 0, 0))
        if name.endswith("segments"):
            return pl.BlockSpec((1, *array.shape[1:]), lambda column, row, _: (row, 0, 0))
        if name == "rotation":
            return pl.BlockSpec(array.shape, lambda *_: (0, 0, 0))
        return pl.BlockSpec((1, array.shape[1], LANES), lambda column, row, _: (row, 0, column))

    return pl.pallas_call(
        functools.partial(kernel, options=options),
        grid=(width // LANES, batch, options.heads // options.heads_of_step(queries, inputs["key"].shape[1])),
        in_specs=[{name: spec(name, array) for name, array in inputs.items()}],
        out_specs={name: spec(name, array) for name, array in outputs.items()},
        out_shape={name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in outputs.items()},
        scratch_shapes=scratch or [],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM
        ),
        cost_estimate=pl.CostEstimate(
            flops=products * 2 * batch * width * scores, transcendentals=batch * width // options.head_dim * scores,
            bytes_accessed=sum(array.size * array.dtype.itemsize for array in arrays),
        ),
        name=f"row_attention{kernel.__name__.removesuffix('_kernel')}",
    )(inputs)


def _forward_kernel(inputs: Refs, outputs: Refs, *, options: Options) -> None:
    all_queries, all_keys = (_rotated(inputs, name, options) for name in ("query", "key"))
    for queries, keys in _blocks(inputs["query"].shape[1], inputs["key"].shape[1], options):
        q, k, v = all_queries[queries], all_keys[keys], inputs["value"][0, keys]
        output = jnp.zeros(q.shape, jnp.float32)
        for head in _heads(inputs, options):
            scores = _scores(inputs, options, head, _of_head(q, head, options), k, queries, keys)
            top = jnp.max(scores, axis=1, keepdims=True)
            exponentials = jnp.exp(scores - top)
            total = jnp.sum(exponentials, axis=1, keepdims=True)
            factor = 1.0 / total
            if options.dropout_rate:
                factor *= keep_scale(options.dropout_rate)
                exponentials = jnp.where(_kept(inputs, options, head, queries, keys), exponentials, 0.0)
            output += _of_head(dot(exponentials.astype(v.dtype), v, (1, 0)) * factor, head, options)
            # Without visible keys the backward pass gets probabilities of 0.
            log_sum = jnp.where(top > HIDDEN, top + jnp.log(total), -HIDDEN)
            outputs["log_sums"][0, 0, pl.ds(head, 1), queries] = as_row(log_sum)
        _store(outputs["output"], queries, output, inputs, options)


def _backward_kernel(inputs: Refs, outputs: Refs, dk_ref, dv_ref, *, options: Options) -> None:
    """Write the gradients of query, key, value and bias; `dk_ref` and `dv_ref` hold float32 sums over the queries."""
    is_first = pl.program_id(2) == 0

    @pl.when(is_first)
    def _():
        dk_ref[...], dv_ref[...] = jnp.zeros_like(dk_ref), jnp.zeros_like(dv_ref)

    if "bias" in inputs:
        @pl.when(is_first & (pl.program_id(1) == 0))
        def _():
            outputs["bias"][...] = jnp.zeros_like(outputs["bias"])

    all_queries, all_keys = (_rotated(inputs, name, options) for name in ("query", "key"))
    for queries, keys in _blocks(inputs["query"].shape[1], inputs["key"].shape[1], options):
        q, k, v = all_queries[queries], all_keys[keys], inputs["value"][0, keys]
        do = inputs["d_output"][0, queries].astype(jnp.float32)
        # Σ_k p · dp of the softmax's gradient is do · output (Dao et al. 2022, appendix B.2).
        row_terms = do * inputs["output"][0, queries].astype(jnp.float32)
        if options.dropout_rate:
            do *= keep_scale(options.dropout_rate)
        do, dq = do.astype(q.dtype), jnp.zeros(q.shape, jnp.float32)
        for head in _heads(inputs, options):
            q_head, k_head, do_head = (_of_head(x, head, options) for x in (q, k, do))
            scores = _scores(inputs, options, head, q_head, k, queries, keys)
            probabilities = jnp.exp(scores - as_column(inputs["log_sums"][0, 0, pl.ds(head, 1), queries]))
            kept, d_kept = probabilities, dot(do_head, v, (1, 1))
            if options.dropout_rate:
                keep = _kept(inputs, options, head, queries, keys)
                kept, d_kept = jnp.where(keep, kept, 0.0), jnp.where(keep, d_kept, 0.0)
            row = jnp.sum(_of_head(row_terms, head, options), axis=1, keepdims=True)
            d_scores = probabilities * (d_kept - row)
            if "bias" in inputs:
                outputs["bias"][head, queries, keys] += d_scores
            d_scores = d_scores.astype(q.dtype)
            dv_ref[keys] += dot(kept.astype(q.dtype), do_head, (0, 0))
            dk_ref[keys] += dot(d_scores, q_head, (0, 0))
            dq += dot(d_scores, k_head, (1, 0))
        _store(outputs["query"], queries, _rotate_back(dq, inputs, queries, options), inputs, options)
    dk = _rotate_back(dk_ref[...], inputs, slice(None), options)
    for name, sums in (("key", dk), ("value", dv_ref[...])):
        outputs[name][0] = sums.astype(outputs[name].dtype)


def _rotated(inputs: Refs, name: str, options: Options) -> Any:
    """Return the queries or keys of this step, rotated by their positions; without rotation their block in VMEM."""
    if "rotation" not in inputs:
        return inputs[name].at[0]
    x, cos, sin = inputs[name][0].astype(jnp.float32), inputs["rotation"][0], inputs["rotation"][1]
    return (x * cos + _swap_halves(x, options) * sin).astype(inputs[name].dtype)


def _rotate_back(x: Float[Array, "rows columns"], inputs: Refs, rows: slice, options: Options) -> jax.Array:
    """Return the gradients of queries or keys from those of the rotated ones."""
    if "rotation" not in inputs:
        return x
    cos, sin = inputs["rotation"][0, rows], inputs["rotation"][1, rows]
    return x * cos - _swap_halves(x, options) * sin


def _swap_halves(x: Float[Array, "rows columns"], options: Options) -> jax.Array:
    """Swap the halves of each head."""
    half = options.head_dim // 2
    before, after = pltpu.roll(x, half, 1), pltpu.roll(x, LANES - half, 1)
    if options.heads == 1:
        return before
    column = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.where((column & half) > 0, before, after)


def _heads(inputs: Refs, options: Options) -> Sequence[int | jax.Array]:
    """Return the heads of this step, of those in its block of columns."""
    count = options.heads_of_step(inputs["query"].shape[1], inputs["key"].shape[1])
    return range(options.heads) if count == options.heads else [pl.program_id(2)]


def _store(ref: Any, queries: slice, x: jax.Array, inputs: Refs, options: Options) -> None:
    """Write the columns of this step's heads; those of the others are zero in `x`."""
    x, heads = x.astype(ref.dtype), _heads(inputs, options)
    if len(heads) < options.heads:
        x = jnp.where(_is_of_head(x, heads[0], options), x, ref[0, queries])
    ref[0, queries] = x


def _blocks(queries: int, keys: int, options: Options) -> Iterator[tuple[slice, slice]]:
    """Yield each block of queries, and the keys that any of them may attend to."""
    # For 512 keys one block is fastest (BERT-base: 0.61 ms a layer, 0.62 with blocks of 256). Under a causal mask
    # smaller blocks skip more keys (GPT-2: 0.69 ms with 256, 0.71 with 512).
    largest = 256 if options.causal or keys > 512 else 512
    size = next(size for size in (512, 256, 128) if size <= largest and queries % size == 0)
    for start in range(0, queries, size):
        first, last = 0, start + size if options.causal else keys
        if options.band is not None:
            first = max(0, start - options.band + 1) // LANES * LANES
            last = min(last, -(-(start + size + options.band - 1) // LANES) * LANES)
        yield slice(start, start + size), slice(first, last)


def _scores(
    inputs: Refs, options: Options, head: int | jax.Array, q: jax.Array, k: jax.Array, queries: slice, keys: slice
) -> Float[Array, "queries keys"]:
    """Return the scores of a block of queries, in float32, with bias and masks."""
    scores = dot(q, k, (1, 1))
    if "bias" in inputs:
        scores += inputs["bias"][head, queries, keys].astype(jnp.float32)
    if "query_segments" in inputs:
        same = as_column(inputs["query_segments"][0, :, queries]) == inputs["key_segments"][0, :, keys]
        scores = jnp.where(same, scores, HIDDEN)
    elif "key_segments" in inputs:
        scores += jnp.where(inputs["key_segments"][0, :, keys] > 0, 0.0, HIDDEN)
    if not options.causal and options.band is None:
        return scores

    def visible(first: int, last: int) -> jax.Array:
        """Return which of the keys from `first` to `last` the queries may attend to."""
        shape = (queries.stop - queries.start, last - first)
        query, key = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        distance = query - key + (queries.start - first)
        if options.band is None:
            return distance >= 0
        return (distance >= 0) & (distance < options.band) if options.causal else jnp.abs(distance) < options.band

    # Without a band only the queries' own block of keys needs a mask.
    first = keys.start if options.band is not None else queries.start
    before, own = scores[:, : first - keys.start], scores[:, first - keys.start :]
    own = jnp.where(visible(first, keys.stop), own, HIDDEN)
    return jnp.concatenate([before, own], axis=1) if before.shape[1] else own


def _kept(inputs: Refs, options: Options, head: int | jax.Array, queries: slice, keys: slice) -> jax.Array:
    """Return the mask of the probabilities of a block of queries that dropout keeps."""
    heads = pl.num_programs(0) * options.heads
    seed = inputs["seeds"][pl.program_id(1) * heads + pl.program_id(0) * options.heads + head]
    shape = (queries.stop - queries.start, keys.stop - keys.start)
    return kept_elements(seed, queries.start, keys.start, shape, inputs["key"].shape[1], options.dropout_rate)


def _of_head(x: jax.Array, head: int | jax.Array, options: Options) -> jax.Array:
    """Return `x` with zeros in the columns of the other heads."""
    if options.heads == 1:
        return x
    return jnp.where(_is_of_head(x, head, options), x, jnp.zeros((), x.dtype))


def _is_of_head(x: jax.Array, head: int | jax.Array, options: Options) -> Bool[Array, "rows columns"]:
    column = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) - head * options.head_dim
    return (column >= 0) & (column < options.head_dim)
