"""Scaled dot-product attention, by the kernel that suits the device and the arguments."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxlm.errors import UserError
from jaxlm.models.layers.dropout import dropout
from jaxlm.parallel.activations import current_mesh, target_platform
from jaxlm.parallel.rules import ACTIVATION_AXES


def attend(
    query: Float[Array, "batch queries heads head_dim"],
    key: Float[Array, "batch keys heads head_dim"],
    value: Float[Array, "batch keys heads head_dim"],
    *,
    query_segments: Int[Array, "batch queries"] | None = None,
    key_segments: Int[Array, "batch keys"] | None = None,
    mask: Bool[Array, "#batch #heads #queries keys"] | None = None,
    bias: Float[Array, "#batch #heads queries keys"] | None = None,
    causal: bool = False,
    scale: float = 1.0,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    implementation: str = "auto",
) -> Float[Array, "batch queries heads head_dim"]:
    """softmax(scale · q kᵀ + bias) v ("Attention Is All You Need", equation 1), softmax in float32.

    A query sees the keys of its own segment; where only key_segments are given, it sees every key whose segment is not
    0, which is padding. mask is True where a query may look, in addition. causal hides later keys (queries and keys
    aligned at the start). A query that may look nowhere gets a finite, meaningless result.
    implementation: "auto", "xla" (scores in memory), "cudnn" or "pallas" (fused). UserError for a fused one where there
    is none, or with dropout on the probabilities, which needs them in memory.
    """
    dropout_rate = 0.0 if dropout_key is None else dropout_rate
    kernel = choose_kernel(implementation, query, key, needs_scores=dropout_rate > 0.0, mask=mask, bias=bias)
    if kernel == "pallas":
        return _pallas(query, key, value, query_segments, key_segments, causal, scale)
    if kernel == "cudnn" and query_segments is None and mask is None:
        lengths = None if key_segments is None else jnp.maximum(jnp.sum(key_segments > 0, axis=1), 1)
        bias = None if bias is None else bias.astype(query.dtype)
        return jax.nn.dot_product_attention(
            query, key, value, bias, scale=scale, is_causal=causal, key_value_seq_lengths=lengths,
            implementation="cudnn",
        )
    visible = visible_keys(query_segments, key_segments, mask, causal, query.shape[1], key.shape[1])
    if kernel == "cudnn":
        # Documents packed into a row: cuDNN takes their mask as a bias, one number for each query and key.
        bias = None if bias is None else bias.astype(query.dtype)
        visible = jnp.broadcast_to(visible, (*visible.shape[:2], query.shape[1], key.shape[1]))
        return jax.nn.dot_product_attention(query, key, value, bias, visible, scale=scale, implementation="cudnn")
    scores = attention_scores(query, key, scale, bias)
    return weighted_values(scores, value, visible, dropout_rate, dropout_key)


def attention_scores(query: jax.Array, key: jax.Array, scale: float, bias: jax.Array | None) -> jax.Array:
    """scale · q kᵀ + bias, [batch, heads, queries, keys]."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32) * scale
    return scores if bias is None else scores + bias


def weighted_values(
    scores: jax.Array, value: jax.Array, visible: jax.Array | None, dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> Float[Array, "batch queries heads head_dim"]:
    """softmax of the visible scores, dropout, times the values."""
    if visible is not None:
        scores = jnp.where(visible, scores, jnp.finfo(scores.dtype).min)
    # In bfloat16 the softmax's sum over hundreds of keys would lose the small probabilities.
    probabilities = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(value.dtype)
    probabilities = dropout(probabilities, dropout_rate, dropout_key)
    return jnp.einsum("bhqk,bkhd->bqhd", probabilities, value)


def visible_keys(
    query_segments: jax.Array | None, key_segments: jax.Array | None, mask: jax.Array | None, causal: bool,
    queries: int, keys: int,
) -> Bool[Array, "#batch #heads #queries keys"] | None:
    """The mask that segments, causality and an explicit mask make together; None where every key is visible."""
    masks = [] if mask is None else [mask]
    if key_segments is not None and query_segments is not None:
        masks.append(query_segments[:, None, :, None] == key_segments[:, None, None, :])
    elif key_segments is not None:
        masks.append(key_segments[:, None, None, :] > 0)
    if causal:
        masks.append(jnp.tri(queries, keys, dtype=bool)[None, None])
    return functools.reduce(jnp.logical_and, masks) if masks else None


def choose_kernel(
    implementation: str, query: jax.Array, key: jax.Array, *, needs_scores: bool, mask: Any, bias: Any
) -> str:
    """"xla", "cudnn" or "pallas", for arguments of these shapes on the platform that the program is for."""
    platform = target_platform()
    queries, (_, keys, _, head_dim) = query.shape[1], key.shape
    if platform == "tpu":
        fused = "pallas" if queries % 128 == 0 and keys % 128 == 0 and mask is None and bias is None else None
    elif platform == "gpu" and cudnn_works(query.dtype.name, head_dim):
        # cuDNN takes masks as biases, and biases have gradients for even lengths only.
        fused = "cudnn" if (bias is None and mask is None) or not (queries % 2 or keys % 2) else None
    else:
        fused = None
    if implementation in ("cudnn", "pallas") and implementation != fused:
        if fused is None and platform in ("gpu", "tpu") and key.shape[1] != queries:
            return "xla"  # attention of a few queries, which no fused kernel takes
        raise UserError(
            f"objective.model.attention is {implementation}, which has no kernel here (platform {platform}, "
            f"{query.dtype.name}, {queries} queries, heads of width {head_dim}); set it to auto."
        )
    if implementation == fused and needs_scores:
        raise UserError(
            f"objective.model.attention is {implementation}, whose kernel cannot drop attention probabilities; set "
            "objective.model.attention_dropout to 0, or objective.model.attention to auto."
        )
    return "xla" if implementation == "xla" or needs_scores or fused is None else fused


@functools.cache
def cudnn_works(dtype: str, head_dim: int) -> bool:
    """Whether the GPU of this process has a fused attention kernel for such heads: asked by compiling a small gradient
    once, which is surer than a table of GPUs and versions."""
    if dtype not in ("bfloat16", "float16") or head_dim % 8 or head_dim > 128:
        return False

    def probe(x, mask, bias):
        y = jax.nn.dot_product_attention(x, x, x, bias, mask, implementation="cudnn")
        return jnp.sum(y.astype(jnp.float32))

    x = jax.ShapeDtypeStruct((2, 128, 2, head_dim), dtype)
    mask = jax.ShapeDtypeStruct((2, 1, 128, 128), bool)
    bias = jax.ShapeDtypeStruct((1, 2, 128, 128), dtype)
    try:
        jax.jit(jax.grad(probe)).lower(x, mask, bias).compile()
    except Exception:  # whatever cuDNN's reason is, scores in memory work
        return False
    return True


def _pallas(query, key, value, query_segments, key_segments, causal, scale):
    """Splash attention, which keeps no scores in memory. The compiler does not partition Pallas kernels, so each device
    runs it on its own rows and heads."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        BlockSizes,
        CausalMask,
        FullMask,
        MultiHeadMask,
        SegmentIds,
        make_splash_mha,
    )

    shape = (query.shape[1], key.shape[1])

    def on_one_device(query, key, value, segments):
        mask = MultiHeadMask([CausalMask(shape) if causal else FullMask(shape)] * query.shape[1])
        block_q, block_kv = (min(512, size) for size in shape)
        blocks = BlockSizes(
            block_q=block_q, block_kv=block_kv, block_kv_compute=block_kv, block_q_dkv=block_q, block_kv_dkv=block_kv,
            block_kv_dkv_compute=block_kv, use_fused_bwd_kernel=True,
        )
        kernel = make_splash_mha(mask, head_shards=1, q_seq_shards=1, block_sizes=blocks)
        return jax.vmap(kernel)(query, key, value, segments)

    segments = None
    if key_segments is not None:
        # Without segments of their own the queries are of one segment, and so are the keys that are not padding.
        own = jnp.ones(query.shape[:2], jnp.int32) if query_segments is None else query_segments
        segments = SegmentIds(q=own, kv=key_segments if query_segments is not None else (key_segments > 0).astype(int))
    arguments = ((query * scale).swapaxes(1, 2), key.swapaxes(1, 2), value.swapaxes(1, 2), segments)
    if (mesh := current_mesh()) is not None:
        heads = "tensor" if query.shape[2] % mesh.shape["tensor"] == 0 else None
        rows = PartitionSpec(ACTIVATION_AXES["batch"])
        split = PartitionSpec(ACTIVATION_AXES["batch"], heads)
        on_one_device = jax.shard_map(
            on_one_device, mesh=mesh, in_specs=(split, split, split, rows), out_specs=split, check_vma=False
        )
    return on_one_device(*arguments).swapaxes(1, 2)
