"""Scaled dot-product attention and the choice of its kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import (
    BlockSizes,
    CausalMask,
    FullMask,
    LocalMask,
    MultiHeadMask,
    QKVLayout,
    SegmentIds,
    make_splash_mha,
)
from jax.sharding import PartitionSpec, get_abstract_mesh
from jaxtyping import Array, Bool, Float, Int

from jaxlm.models.layers.banded import banded_attention, in_band
from jaxlm.models.layers.dropout import dropout_seeds, keep_mask, keep_scale
from jaxlm.models.layers.kernel_tools import HIDDEN, LANES
from jaxlm.models.layers.rotary import Rope, rotate, rotation_table
from jaxlm.models.layers.row_attention import LONGEST_ROTATED, AttentionInputs, Options, row_attention
from jaxlm.parallel.rules import ACTIVATION_AXES


def attend(
    query: Float[Array, "batch queries heads head_dim"],
    key: Float[Array, "batch keys kv_heads head_dim"],
    value: Float[Array, "batch keys kv_heads head_dim"],
    *,
    query_segments: Int[Array, "batch queries"] | None = None,
    key_segments: Int[Array, "batch keys"] | None = None,
    lengths: Int[Array, " batch"] | None = None,
    mask: Bool[Array, "#batch #heads #queries keys"] | None = None,
    bias: Float[Array, "#batch #heads queries keys"] | None = None,
    causal: bool = False,
    band: int | None = None,
    rope: Rope | None = None,
    scale: float = 1.0,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    kernel: str = "xla",
) -> Float[Array, "batch queries heads head_dim"]:
    """Return softmax(scale · q kᵀ + bias) v ("Attention Is All You Need", equation 1), with the softmax in float32.

    A query without visible keys gets a finite, meaningless result.

    Args:
        query: Queries.
        key: Keys. Consecutive query heads share one of their heads where those are fewer.
        value: Values.
        query_segments: Segment of each query, which attends only to keys of that segment; None to attend to all keys
            but padding.
        key_segments: Segment of each key; 0 is padding, which may stand anywhere.
        lengths: Number of keys before the padding, where that is known to stand at the end: cuDNN needs no mask then.
        mask: True where attention is allowed, in addition to the segments.
        bias: Added to the scores.
        causal: Whether later keys are masked; queries and keys are aligned at the start.
        band: Number of keys from its own position on, to either side, that a query attends to; None for all.
        rope: Rotary position embeddings of queries and keys, which are as many; None for none, or rotated vectors.
        scale: Factor on the scores.
        dropout_rate: Dropout rate of the probabilities.
        dropout_key: Dropout key; None turns dropout off.
        kernel: "xla" (scores in memory), "cudnn", "rows" or "splash" (fused), or in blocks: see `choose_kernel`.
    """
    if rope is not None and (kernel != "rows" or query.shape[1] > LONGEST_ROTATED):
        positions = jnp.arange(query.shape[1])[None]
        query, key, rope = rotate(query, positions, rope), rotate(key, positions, rope), None
    key, value = (repeat_heads(y, query.shape[2]) for y in (key, value))
    if kernel == "rows":
        options = Options(query.shape[-1], causal, band, dropout_rate if dropout_key is not None else 0.0)
        return _by_rows(options, query, key, value, bias, query_segments, key_segments, scale, dropout_key, rope)
    if kernel == "splash":
        return _by_splash(query, key, value, query_segments, key_segments, causal, scale, band)
    if kernel == "cudnn":
        return _by_cudnn(query, key, value, query_segments, key_segments, lengths, mask, bias, causal, band, scale)
    if kernel.endswith(" in blocks"):
        dropped = dict(dropout_rate=dropout_rate, dropout_key=dropout_key)
        block = functools.partial(attend, scale=scale, kernel=kernel.removesuffix(" in blocks"), **dropped)
        return banded_attention(block, query, key, value, query_segments, key_segments, band=band, causal=causal)
    visible = visible_keys(query_segments, key_segments, mask, causal, query.shape[1], key.shape[1], band)
    seeds = None
    if dropout_key is not None and dropout_rate > 0.0:
        seeds = dropout_seeds(dropout_key, (query.shape[0], query.shape[2]))
    return _attention(query, key, value, bias, visible, seeds, scale, dropout_rate)


def repeat_heads(
    x: Float[Array, "batch keys kv_heads head_dim"], heads: int
) -> Float[Array, "batch keys heads head_dim"]:
    """Return each head of keys or values for the consecutive query heads that share it."""
    return x if x.shape[2] == heads else jnp.repeat(x, heads // x.shape[2], axis=2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _attention(query, key, value, bias, visible, seeds, scale, rate):
    """Return attention with the scores in memory; `seeds` are those of dropout, [batch, heads].

    The step is bound by memory bandwidth, so the gradient is written out. The backward pass keeps the unnormalized
    softmax exp(score - max) in the compute type; normalization and the scale of dropout are applied to the
    [queries, head_dim] arrays before and after it.
    """
    return _attention_forward(query, key, value, bias, visible, seeds, scale, rate)[0]


def _attention_forward(query, key, value, bias, visible, seeds, scale, rate):
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32) * scale
    if bias is not None:
        scores = scores + bias
    if visible is not None:
        scores = jnp.where(visible, scores, HIDDEN)
    exponentials = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    total = checkpoint_name(jnp.sum(exponentials, axis=-1), "attention_scores")
    exponentials = checkpoint_name(exponentials.astype(value.dtype), "attention_scores")
    factor = 1.0 if seeds is None else keep_scale(rate)
    output = jnp.einsum("bhqk,bkhd->bqhd", _kept(exponentials, seeds, rate), value, preferred_element_type=jnp.float32)
    output = checkpoint_name((output * _per_query(factor / total)).astype(query.dtype), "attention")
    return output, (query, key, value, bias, output, exponentials, total, seeds)


def _attention_backward(scale, rate, saved, gradient):
    query, key, value, bias, output, exponentials, total, seeds = saved
    factor = 1.0 if seeds is None else keep_scale(rate)
    # With a barrier the mask of dropout is computed again; without it the compiler may store that of the forward pass.
    seeds = jax.lax.optimization_barrier(seeds)
    gradient = (gradient.astype(jnp.float32) * _per_query(factor / total)).astype(query.dtype)
    # The barrier keeps the compiler from computing it again in each operation that reads it.
    gradient = jax.lax.optimization_barrier(gradient)
    d_value = jnp.einsum("bhqk,bqhd->bkhd", _kept(exponentials, seeds, rate), gradient)
    d_probability = jnp.einsum("bqhd,bkhd->bhqk", gradient, value, preferred_element_type=jnp.float32)
    # Σ_k p · dp of the softmax's gradient, from the output instead of the scores (Dao et al. 2022, appendix B.2).
    row = jnp.sum(gradient.astype(jnp.float32) * output.astype(jnp.float32), axis=-1).swapaxes(1, 2) / factor
    d_scores = exponentials.astype(jnp.float32) * (_kept(d_probability, seeds, rate) - row[..., None])
    d_bias = None
    if bias is not None:
        sizes = zip(bias.shape, d_scores.shape, strict=True)
        axes = tuple(i for i, (size, other) in enumerate(sizes) if size != other)
        d_bias = jnp.sum(d_scores, axis=axes, keepdims=True).astype(bias.dtype)
    d_scores = d_scores.astype(query.dtype)
    scale = jnp.asarray(scale, query.dtype)
    d_query = jnp.einsum("bhqk,bkhd->bqhd", d_scores, key * scale)
    d_key = jnp.einsum("bhqk,bqhd->bkhd", d_scores, query * scale)
    return d_query, d_key, d_value, d_bias, None, None


_attention.defvjp(_attention_forward, _attention_backward)


def _per_query(x: Float[Array, "batch heads queries"]) -> Float[Array, "batch queries heads 1"]:
    return x.swapaxes(1, 2)[..., None]


def _kept(x: Float[Array, "batch heads queries keys"], seeds: jax.Array | None, rate: float) -> jax.Array:
    """Return `x` with zeros where dropout drops."""
    return x if seeds is None else jnp.where(keep_mask(seeds, x.shape[2:], rate), x, jnp.zeros((), x.dtype))


def _with_gradient(where: jax.Array, x: jax.Array) -> jax.Array:
    """Return `x`, whose gradient is 0 except where `where` holds."""
    return jnp.where(where, x, jax.lax.stop_gradient(x))


def _by_cudnn(query, key, value, query_segments, key_segments, lengths, mask, bias, causal, band, scale):
    """Return attention by cuDNN's kernel, which takes lengths, or else the mask of each query and key."""
    visible = None
    if causal and query_segments is None and lengths is not None:  # no query of a text sees the padding after it
        key_segments = lengths = None
    # cuDNN has windows of its own for causal attention.
    has_window = causal and band is not None and all(x is None for x in (query_segments, key_segments, mask, bias))
    is_whole = query_segments is None and mask is None and (band is None or has_window)
    if is_whole and (key_segments is None or lengths is not None):
        lengths = None if key_segments is None else jnp.maximum(lengths, 1)
    else:
        lengths = None
        visible = visible_keys(query_segments, key_segments, mask, causal, query.shape[1], key.shape[1], band)
    if visible is not None:
        visible = jnp.broadcast_to(visible, (*visible.shape[:2], query.shape[1], key.shape[1]))
    bias = None if bias is None else bias.astype(query.dtype)
    rows, heads = ACTIVATION_AXES["batch"], split_heads(query.shape[2])[0]

    def spec(x: jax.Array) -> PartitionSpec:
        """Return the sharding of an array [batch, heads, …], in which either may be 1."""
        return PartitionSpec(rows if x.shape[0] > 1 else None, heads if x.shape[1] > 1 else None)

    def run(query, key, value, bias, visible, lengths):
        # cuDNN leaves the gradients of what no query sees unwritten (openxla/xla#44867, #46500).
        written = jnp.ones((1, key.shape[1]), bool) if lengths is None else jnp.arange(key.shape[1]) < lengths[:, None]
        if lengths is not None:
            key, value = (_with_gradient(written[..., None, None], x) for x in (key, value))
        if bias is not None:
            seen = jnp.any(written, axis=0) & (jnp.tri(*bias.shape[2:], dtype=bool) if causal else True)
            bias = _with_gradient(seen, bias)
        return jax.nn.dot_product_attention(
            query, key, value, bias, visible, scale=scale, is_causal=causal, key_value_seq_lengths=lengths,
            local_window_size=(band - 1, 0) if has_window else None, implementation="cudnn",
        )

    split = PartitionSpec(rows, None, heads)
    # jax's own partitioning of the kernel refuses a bias that the compiler has sharded in another way than the queries.
    specs = (split, split, split, *(None if x is None else spec(x) for x in (bias, visible)), PartitionSpec(rows))
    return on_each_device(run, specs, split)(query, key, value, bias, visible, lengths)


def _by_rows(options, query, key, value, bias, query_segments, key_segments, scale, dropout_key, rope):
    """Return attention by the TPU's kernel for short rows (`row_attention`)."""
    (batch, length, heads, head_dim), seeds = query.shape, None
    if options.dropout_rate:
        seeds = dropout_seeds(dropout_key, (batch, heads))
    rows = AttentionInputs(
        *(x.reshape(*x.shape[:2], -1) for x in (query * jnp.asarray(scale, query.dtype), key, value)),
        bias=None if bias is None else bias[0].astype(jnp.float32),
        query_segments=None if query_segments is None else query_segments[:, None],
        key_segments=None if key_segments is None else key_segments[:, None],
        seeds=seeds,
        rotation=None if rope is None else rotation_table(length, rope, head_dim, LANES),
    )
    over_rows, over_heads = ACTIVATION_AXES["batch"], split_heads(heads)[0]
    split, row = PartitionSpec(over_rows, None, over_heads), PartitionSpec(over_rows)
    seed = PartitionSpec(over_rows, over_heads)
    specs = AttentionInputs(split, split, split, PartitionSpec(over_heads), row, row, seed, PartitionSpec())
    run = on_each_device(functools.partial(row_attention, options=options), (specs,), split)
    return run(rows).reshape(query.shape)


def joint_segments(
    query_segments: Int[Array, "batch queries"] | None, key_segments: Int[Array, "batch keys"], queries: int
) -> tuple[Int[Array, "batch queries"], Int[Array, "batch keys"]]:
    """Return segments by which a query attends to the keys of its own: without any, all are 1 but padding."""
    if query_segments is not None:
        return query_segments, key_segments
    return jnp.ones((key_segments.shape[0], queries), jnp.int32), (key_segments > 0).astype(jnp.int32)


def on_each_device(kernel: Callable, in_specs: tuple[Any, ...], out_specs: PartitionSpec) -> Callable:
    """Return a Pallas kernel that each device runs on its rows and heads: the compiler does not partition it."""
    if get_abstract_mesh().empty:
        return kernel
    return jax.shard_map(kernel, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def split_heads(heads: int) -> tuple[str | None, int]:
    """Return the mesh axis that shards the heads, or None, and the number of heads on one device."""
    axis = ACTIVATION_AXES["heads"]
    size = get_abstract_mesh().shape.get(axis, 1)
    return (axis, heads // size) if heads % size == 0 else (None, heads)


def visible_keys(
    query_segments: jax.Array | None, key_segments: jax.Array | None, mask: jax.Array | None, causal: bool,
    queries: int, keys: int, band: int | None = None,
) -> Bool[Array, "#batch #heads #queries keys"] | None:
    """Return the joint mask of segments, causality, band and explicit mask; None if every key is visible."""
    masks = [] if mask is None else [mask]
    if key_segments is not None and query_segments is not None:
        masks.append(query_segments[:, None, :, None] == key_segments[:, None, None, :])
    elif key_segments is not None:
        masks.append(key_segments[:, None, None, :] > 0)
    if causal:
        masks.append(jnp.tri(queries, keys, dtype=bool)[None, None])
    if band is not None:
        masks.append(in_band(queries, keys, band))
    return functools.reduce(jnp.logical_and, masks) if masks else None


def _by_splash(query, key, value, query_segments, key_segments, causal, scale, band):
    """Return attention by splash attention, the TPU's kernel for long rows: the softmax is over blocks of keys."""
    segments = None
    if key_segments is not None:
        segments = SegmentIds(*joint_segments(query_segments, key_segments, query.shape[1]))
    rows = PartitionSpec(ACTIVATION_AXES["batch"])
    split = PartitionSpec(ACTIVATION_AXES["batch"], split_heads(query.shape[2])[0])
    run = on_each_device(functools.partial(_splash, causal=causal, band=band), (split, split, split, rows), split)
    query = query * jnp.asarray(scale, query.dtype)
    return run(*(x.swapaxes(1, 2) for x in (query, key, value)), segments).swapaxes(1, 2)


def _splash(query, key, value, segments, causal, band):
    shape = queries, keys = query.shape[2], key.shape[2]
    mask, scope = (CausalMask(shape), "causal") if causal else (FullMask(shape), "full")
    if band is not None:
        after = 0 if causal else band - 1
        mask, scope = LocalMask(shape, (band - 1, after), 0), f"band_{band + after}"
    block_q, block_kv = (max(n for n in (128, 256, 512) if size % n == 0) for size in (queries, keys))
    # Positions are along the lanes, because heads of 64 would fill half of them. In the fused backward pass each block
    # of keys makes a part of the queries' gradient, so blocks are as large as possible.
    layout = QKVLayout.SEQ_MINOR
    # Under a band most parts would be zero, and two kernels visit the blocks of the band only.
    is_fused = band is None
    blocks = BlockSizes(
        block_q=block_q, block_kv=block_kv, block_kv_compute=block_kv, block_q_dkv=block_q, block_kv_dkv=block_kv,
        block_kv_dkv_compute=block_kv, block_q_dq=None if is_fused else block_q,
        block_kv_dq=None if is_fused else block_kv, use_fused_bwd_kernel=is_fused, q_layout=layout, k_layout=layout,
        v_layout=layout,
    )
    kernel = make_splash_mha(
        MultiHeadMask([mask] * query.shape[1]), head_shards=1, q_seq_shards=1, block_sizes=blocks,
        residual_checkpoint_name="attention",
    )
    # The name tells `jaxlm plan` how much of the scores the kernel computes.
    with jax.named_scope(f"{scope}_attention"):
        return jax.vmap(kernel)(query, key, value, segments)
