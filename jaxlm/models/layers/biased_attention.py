"""Pallas kernel of attention with a bias, for TPUs.

VMEM holds all scores of one head and one row of the batch, so that the softmax needs no blocks of keys. The backward
pass computes the scores again and sums the gradient of the bias over the rows. Arrays keep their layout [batch, length,
heads · head_dim]. A block is 128 columns wide, and narrower heads share it, each behind a mask.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

COLUMNS = 128
"""Columns of a block: the width of a TPU's tiles and matrix unit."""
VMEM = 30 * 2**20
"""Bytes of vector memory that a kernel may use. Arrays that fit were compiled for v4, which has 16 MiB."""
MOST_SCORES = 2**19
"""Limit of the scores of all heads in a block. VMEM holds their bias and its gradient twice."""


def fits(queries: int, keys: int, heads: int, head_dim: int) -> bool:
    """Return whether the kernel supports arrays of these sizes."""
    aligned = queries % 128 == 0 and keys % 128 == 0 and COLUMNS % head_dim == 0 and heads * head_dim % COLUMNS == 0
    return aligned and COLUMNS // head_dim * queries * keys <= MOST_SCORES


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def biased_attention(
    query: Float[Array, "batch queries width"],
    key: Float[Array, "batch keys width"],
    value: Float[Array, "batch keys width"],
    bias: Float[Array, "heads queries keys"],
    key_bias: Float[Array, "batch 1 keys"],
    head_dim: int,
    interpret: bool = False,
) -> Float[Array, "batch queries width"]:
    """Return softmax(q kᵀ + bias + key_bias) v, with the softmax in float32.

    `width` is heads · head_dim. `key_bias` has no gradient.
    """
    specs = _specs(query, key, bias, head_dim)
    return _call(_forward_kernel, 2, specs, specs[0], query, interpret, query, key, value, bias, key_bias)


def _forward(*arguments):
    return biased_attention(*arguments), arguments[:5]


def _backward(head_dim, interpret, saved, gradient):
    query, key, value, bias, _ = saved
    q, kv, _, scores, _ = specs = _specs(query, key, bias, head_dim)
    shapes = (query, key, value, jax.ShapeDtypeStruct(bias.shape, jnp.float32))
    *others, d_bias = _call(_backward_kernel, 5, [*specs, q], (q, kv, kv, scores), shapes, interpret, *saved, gradient)
    return *others, d_bias.astype(bias.dtype), None


biased_attention.defvjp(_forward, _backward)


def _specs(query: jax.Array, key: jax.Array, bias: jax.Array, head_dim: int) -> list[pl.BlockSpec]:
    """Return the blocks of query, key, value, bias and key_bias. The grid (columns, batch) reads each bias once."""
    q, kv = (pl.BlockSpec((1, x.shape[1], COLUMNS), lambda c, b: (b, 0, c)) for x in (query, key))
    scores = pl.BlockSpec((COLUMNS // head_dim, *bias.shape[1:]), lambda c, b: (c, 0, 0))
    return [q, kv, kv, scores, pl.BlockSpec((1, 1, key.shape[1]), lambda c, b: (b, 0, 0))]


def _call(kernel, products, in_specs, out_specs, shapes, interpret, query, key, value, bias, *rest):
    """Run a kernel with `products` matrix products, a number that its cost estimate needs.

    Each head computes all columns of its block.
    """
    batch, queries, width = query.shape
    flops = products * 2 * batch * bias.shape[0] * COLUMNS * queries * key.shape[1]
    arrays = (query, key, value, bias, *rest)
    return pl.pallas_call(
        kernel,
        grid=(width // COLUMNS, batch),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM
        ),
        cost_estimate=pl.CostEstimate(
            flops=flops, transcendentals=batch * bias.size, bytes_accessed=sum(x.nbytes for x in arrays)
        ),
        interpret=interpret,
        name=f"biased_attention{kernel.__name__.removesuffix('_kernel')}",
    )(*arrays)


def _dot(a: jax.Array, b: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    return jax.lax.dot_general(
        a, b, (((contracted[0],), (contracted[1],)), ((), ())), preferred_element_type=jnp.float32
    )


def _of_head(x: jax.Array, head: int, heads: int) -> jax.Array:
    """Return `x` with zeros in the columns of the other heads."""
    column = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) - head * (COLUMNS // heads)
    return jnp.where((column >= 0) & (column < COLUMNS // heads), x, jnp.zeros((), x.dtype))


def _softmax(query, key, bias, key_bias):
    """Return the unnormalized probabilities and their sums, in float32."""
    scores = _dot(query, key, (1, 1)) + bias.astype(jnp.float32) + key_bias
    exponentials = jnp.exp(scores - jnp.max(scores, axis=1, keepdims=True))
    return exponentials, jnp.sum(exponentials, axis=1, keepdims=True)


def _forward_kernel(q_ref, k_ref, v_ref, bias_ref, key_bias_ref, out_ref):
    heads = bias_ref.shape[0]
    q, k, v = q_ref[0], k_ref[0], v_ref[0]
    out = jnp.zeros(q.shape, jnp.float32)
    for head in range(heads):
        exponentials, total = _softmax(_of_head(q, head, heads), k, bias_ref[head], key_bias_ref[0])
        out += _of_head(_dot(exponentials.astype(v.dtype), v, (1, 0)) / total, head, heads)
    out_ref[0] = out.astype(out_ref.dtype)


def _backward_kernel(q_ref, k_ref, v_ref, bias_ref, key_bias_ref, do_ref, dq_ref, dk_ref, dv_ref, d_bias_ref):
    heads = bias_ref.shape[0]
    q, k, v, do = q_ref[0], k_ref[0], v_ref[0], do_ref[0]
    dq, dk, dv = (jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))

    @pl.when(pl.program_id(1) == 0)
    def _():
        d_bias_ref[...] = jnp.zeros_like(d_bias_ref)

    for head in range(heads):
        q_head, k_head, do_head = (_of_head(x, head, heads) for x in (q, k, do))
        exponentials, total = _softmax(q_head, k, bias_ref[head], key_bias_ref[0])
        probabilities = exponentials / total
        dv += _dot(probabilities.astype(do.dtype), do_head, (0, 0))
        d_probabilities = _dot(do_head, v, (1, 1))
        row = jnp.sum(probabilities * d_probabilities, axis=1, keepdims=True)
        d_scores = probabilities * (d_probabilities - row)
        d_bias_ref[head] += d_scores
        d_scores = d_scores.astype(q.dtype)
        dq += _dot(d_scores, k_head, (1, 0))
        dk += _dot(d_scores, q_head, (0, 0))
    for ref, x in ((dq_ref, dq), (dk_ref, dk), (dv_ref, dv)):
        ref[0] = x.astype(ref.dtype)
