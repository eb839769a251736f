"""Pallas kernel of attention in chunks (Reformer), for TPUs.

A step of the grid has a block of consecutive chunks of one head of one row, and the chunk before them. Each chunk's
queries attend to its own keys and those of the previous chunk; VMEM holds their scores, and no score is written to HBM.
The backward pass computes the scores and the mask of dropout again.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jaxlm.models.layers.dropout import keep_scale
from jaxlm.models.layers.kernel_tools import HIDDEN, LANES, VMEM, as_column, as_row, dot, kept_elements

BLOCK = 1024
"""Queries of a step of the grid."""


class Options(NamedTuple):
    """What a kernel is compiled for."""

    chunk: int
    """Number of vectors of a chunk."""
    self_score: float | None = None
    """Score of a token's own key in place of q · k."""
    dropout_rate: float = 0.0


class ChunkedInputs(NamedTuple):
    """Inputs of attention."""

    query: Float[Array, "batch heads n 128"]
    key: Float[Array, "batch heads n 128"]
    value: Float[Array, "batch heads n 128"]
    vectors: Int[Array, "batch heads 2 n"]
    """Position and document of each vector. A query attends to keys of its document, at its position or before it."""
    seeds: Int[Array, "batch heads"]
    """Seeds of dropout."""


def fits(n: int, chunk: int, head_dim: int) -> bool:
    """Return whether the kernel supports arrays of these sizes; the scores of a larger chunk fill a v4's memory."""
    return n % BLOCK == 0 and chunk in (LANES, 2 * LANES) and head_dim == LANES and chunk < n


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def chunked_attention(
    inputs: ChunkedInputs, options: Options
) -> tuple[Float[Array, "batch heads n 128"], Float[Array, "batch heads 1 n"]]:
    """Return softmax(q kᵀ) v, and the logarithm of the softmax's denominator in float32.

    Before the first chunk comes the last one.
    """
    return _forward(inputs, options)[0]


def _forward(inputs, options):
    shape = jax.ShapeDtypeStruct((*inputs.seeds.shape, 1, inputs.query.shape[2]), jnp.float32)
    found = _call(_forward_kernel, 2, options, inputs, {}, {"output": inputs.query, "log_sums": shape})
    return (found["output"], found["log_sums"]), (inputs, found)


def _backward(options, saved, gradients):
    inputs, found = saved
    found = found | {"d_output": gradients[0], "d_log_sums": gradients[1]}
    batch, heads, n, width = inputs.key.shape
    before = jax.ShapeDtypeStruct((batch, heads, n // BLOCK * options.chunk, width), jnp.float32)
    shapes = {name: getattr(inputs, name) for name in ("query", "key", "value")}
    shapes |= {"key_before": before, "value_before": before}
    sums = [pltpu.VMEM((options.chunk + BLOCK, width), jnp.float32)] * 2
    d = _call(_backward_kernel, 5, options, inputs, found, shapes, sums)

    def with_next(x: jax.Array, before: jax.Array) -> jax.Array:
        """Add to each block's last chunk the gradient from the block after it."""
        blocks, before = (y.reshape(batch, heads, n // BLOCK, -1, width) for y in (x, before))
        last = blocks[..., -options.chunk :, :] + jnp.roll(before, -1, axis=2)
        blocks = jnp.concatenate([blocks[..., : -options.chunk, :], last.astype(x.dtype)], axis=3)
        return blocks.reshape(x.shape)

    d_key, d_value = (with_next(d[name], d[f"{name}_before"]) for name in ("key", "value"))
    return (ChunkedInputs(d["query"], d_key, d_value, None, None),)


chunked_attention.defvjp(_forward, _backward)


def _call(
    kernel, products: int, options: Options, inputs: ChunkedInputs, saved: dict, outputs: dict,
    scratch: list | None = None,
) -> dict[str, jax.Array]:
    """Run a kernel over the grid (batch, heads, blocks); `products` is the number of its products with scores."""
    batch, heads, n, width = inputs.query.shape
    chunks, of_block = n // options.chunk, BLOCK // options.chunk

    def before(block: Any) -> Any:
        return jax.lax.rem(block * of_block + chunks - 1, chunks)

    def spec(name: str, array: Any, is_input: bool = True) -> pl.BlockSpec:
        size = options.chunk if name.endswith("before") else BLOCK
        # Gradients of the chunks before the blocks are in the order of the blocks.
        place = before if name.endswith("before") and is_input else lambda block: block
        if array.shape[2] <= 2:
            return pl.BlockSpec((1, 1, array.shape[2], size), lambda row, head, block: (row, head, 0, place(block)))
        return pl.BlockSpec((1, 1, size, width), lambda row, head, block: (row, head, place(block), 0))

    arrays = {name: array for name, array in inputs._asdict().items() if name != "seeds"} | saved
    arrays |= {f"{name}_before": arrays[name] for name in ("key", "value", "vectors")}
    in_specs = {name: spec(name, array) for name, array in arrays.items()}
    in_specs["seeds"] = pl.BlockSpec(memory_space=pltpu.SMEM)
    arrays["seeds"] = inputs.seeds.reshape(-1)
    moved = [*arrays.values(), *outputs.values()]
    scores = batch * heads * n * 2 * options.chunk
    return pl.pallas_call(
        functools.partial(kernel, options=options),
        grid=(batch, heads, n // BLOCK),
        in_specs=[in_specs],
        out_specs={name: spec(name, array, False) for name, array in outputs.items()},
        out_shape={name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in outputs.items()},
        scratch_shapes=scratch or [],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM
        ),
        cost_estimate=pl.CostEstimate(
            flops=products * 2 * width * scores, transcendentals=scores,
            bytes_accessed=sum(array.size * array.dtype.itemsize for array in moved),
        ),
        name=f"chunked_attention{kernel.__name__.removesuffix('_kernel')}",
    )(arrays)


def _forward_kernel(inputs: dict[str, Any], outputs: dict[str, Any], *, options: Options) -> None:
    for chunk in range(BLOCK // options.chunk):
        queries, (_, v), scores, _ = _scores(inputs, chunk, options)
        top = jnp.max(scores, axis=1, keepdims=True)
        exponentials = jnp.exp(scores - top)
        total = jnp.sum(exponentials, axis=1, keepdims=True)
        if options.dropout_rate:
            exponentials = jnp.where(_kept(inputs, chunk, options), exponentials, 0.0)
        output = dot(exponentials.astype(v.dtype), v, (1, 0)) * (keep_scale(options.dropout_rate) / total)
        outputs["output"][0, 0, queries] = output.astype(v.dtype)
        outputs["log_sums"][0, 0, :, queries] = as_row(top + jnp.log(total))


def _backward_kernel(inputs: dict[str, Any], outputs: dict[str, Any], dk_ref, dv_ref, *, options: Options) -> None:
    """Write the gradients of queries, keys and values; `dk_ref` and `dv_ref` hold sums, the chunk before first."""
    dk_ref[...], dv_ref[...] = jnp.zeros_like(dk_ref), jnp.zeros_like(dv_ref)
    for chunk in range(BLOCK // options.chunk):
        queries, (k, v), scores, is_self = _scores(inputs, chunk, options)
        do = inputs["d_output"][0, 0, queries].astype(jnp.float32)
        # Σ_k p · dp of the softmax's gradient, from the output instead of the scores (Dao et al. 2022, appendix B.2).
        row = jnp.sum(do * inputs["output"][0, 0, queries].astype(jnp.float32), axis=1, keepdims=True)
        row -= as_column(inputs["d_log_sums"][0, 0, :, queries])
        do = (do * keep_scale(options.dropout_rate)).astype(v.dtype)
        probabilities = jnp.exp(scores - as_column(inputs["log_sums"][0, 0, :, queries]))
        kept, d_kept = probabilities, dot(do, v, (1, 1))
        if options.dropout_rate:
            keep = _kept(inputs, chunk, options)
            kept, d_kept = jnp.where(keep, kept, 0.0), jnp.where(keep, d_kept, 0.0)
        d_scores = probabilities * (d_kept - row)
        if is_self is not None:
            d_scores = jnp.where(is_self, 0.0, d_scores)
        d_scores, keys = d_scores.astype(v.dtype), slice(queries.start, queries.stop + options.chunk)
        outputs["query"][0, 0, queries] = dot(d_scores, k, (1, 0)).astype(v.dtype)
        dk_ref[keys] += dot(d_scores, inputs["query"][0, 0, queries], (0, 0))
        dv_ref[keys] += dot(kept.astype(v.dtype), do, (0, 0))
    for name, sums in (("key", dk_ref), ("value", dv_ref)):
        outputs[f"{name}_before"][0, 0] = sums[: options.chunk]
        outputs[name][0, 0] = sums[options.chunk :].astype(outputs[name].dtype)


def _scores(inputs: dict[str, Any], chunk: int, options: Options) -> tuple[slice, list[jax.Array], jax.Array, Any]:
    """Return the queries of a chunk; their keys and values; their scores; and which key is the query's own token."""
    size = options.chunk
    queries = slice(chunk * size, (chunk + 1) * size)

    def window(name: str, axis: int) -> jax.Array:
        if chunk:
            keys = slice(queries.start - size, queries.stop)
            return inputs[name][0, 0, keys] if axis == 0 else inputs[name][0, 0, :, keys]
        own = inputs[name][0, 0, queries] if axis == 0 else inputs[name][0, 0, :, queries]
        return jnp.concatenate([inputs[f"{name}_before"][0, 0], own], axis=axis)

    k, v, there = window("key", 0), window("value", 0), window("vectors", 1)
    here, document = (as_column(inputs["vectors"][0, 0, i : i + 1, queries]) for i in range(2))
    scores = dot(inputs["query"][0, 0, queries], k, (1, 1))
    scores = jnp.where((here >= there[:1]) & (document == there[1:]), scores, HIDDEN)
    if options.self_score is None:
        return queries, [k, v], scores, None
    is_self = here == there[:1]
    return queries, [k, v], jnp.where(is_self, options.self_score, scores), is_self


def _kept(inputs: dict[str, Any], chunk: int, options: Options) -> jax.Array:
    """Return the mask of the probabilities of a chunk that dropout keeps."""
    seed, size = inputs["seeds"][pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)], options.chunk
    first = pl.program_id(2) * BLOCK + chunk * size
    return kept_elements(seed, first, 0, (size, 2 * size), 2 * size, options.dropout_rate)
