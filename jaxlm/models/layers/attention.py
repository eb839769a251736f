"""Scaled dot-product attention: one function, the best kernel of each platform behind it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxlm.errors import UserError
from jaxlm.models.layers.dropout import dropout


def attend(
    query: Float[Array, "batch queries heads head_dim"],
    key: Float[Array, "batch keys heads head_dim"],
    value: Float[Array, "batch keys heads head_dim"],
    *,
    mask: Bool[Array, "#batch #heads #queries keys"] | None = None,
    bias: Float[Array, "#batch #heads queries keys"] | None = None,
    causal: bool = False,
    scale: float = 1.0,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    implementation: str = "auto",
) -> Float[Array, "batch queries heads head_dim"]:
    """softmax(scale · q kᵀ + bias) v, "Attention Is All You Need" eq. 1.

    mask is True where a query may look; a query that may look nowhere gets a finite, meaningless row.
    causal adds the lower-triangular mask (queries and keys aligned at the start).
    implementation: "auto", or one that `jax.nn.dot_product_attention` knows ("xla", "cudnn"). UserError for "cudnn"
    where there is none, and with dropout.
    Dropout on the probabilities (dropout_rate > 0 with a key) needs them in memory, so it takes the plain path.
    """
    if implementation == "cudnn":
        _require_cudnn(query.dtype.name, query.shape[-1], dropout_rate > 0.0 and dropout_key is not None)
    if dropout_rate > 0.0 and dropout_key is not None:
        return _attend_with_dropout(query, key, value, mask, bias, causal, scale, dropout_rate, dropout_key)
    if implementation == "auto":
        implementation = best_implementation(query.dtype.name, query.shape[-1])
        # cuDNN takes masks as biases, and biases have gradients for even lengths only.
        if (bias is not None or mask is not None) and (query.shape[1] % 2 or key.shape[1] % 2):
            implementation = "xla"
    if implementation == "cudnn":
        # It knows masks as biases of the scores' type, one for each pair of a query and a key.
        bias = None if bias is None else bias.astype(query.dtype)
        mask = None if mask is None else jnp.broadcast_to(mask, (*mask.shape[:2], query.shape[1], key.shape[1]))
    return jax.nn.dot_product_attention(
        query, key, value, bias, mask, scale=scale, is_causal=causal, implementation=implementation
    )


def _require_cudnn(dtype: str, head_dim: int, with_dropout: bool) -> None:
    if best_implementation(dtype, head_dim) != "cudnn":
        raise UserError(
            f"objective.model.attention is cudnn, which has no kernel here (platform {jax.default_backend()}, {dtype}, "
            f"heads of width {head_dim}); set it to auto."
        )
    if with_dropout:
        raise UserError(
            "objective.model.attention is cudnn, whose kernel cannot drop attention probabilities; set "
            "objective.model.attention_dropout to 0, or objective.model.attention to auto."
        )


def _attend_with_dropout(query, key, value, mask, bias, causal, scale, dropout_rate, dropout_key):
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32) * scale
    if bias is not None:
        scores = scores + bias
    if causal:
        lower = jnp.tri(scores.shape[-2], scores.shape[-1], dtype=bool)
        mask = lower if mask is None else mask & lower
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    # Softmax in float32: in bfloat16 its sum over hundreds of keys loses the small probabilities.
    probabilities = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
    probabilities = dropout(probabilities, dropout_rate, dropout_key)
    return jnp.einsum("bhqk,bkhd->bqhd", probabilities, value)


@functools.cache
def best_implementation(dtype: str, head_dim: int) -> str:
    """"cudnn" (fused, flash) where this process runs on a GPU whose cuDNN compiles it, else "xla".

    The probe compiles a tiny gradient once; asking the library is surer than a table of GPUs and versions.
    """
    if jax.default_backend() != "gpu" or dtype not in ("bfloat16", "float16") or head_dim % 8 or head_dim > 128:
        return "xla"

    def probe(x, mask, bias):
        y = jax.nn.dot_product_attention(x, x, x, bias, mask, implementation="cudnn")
        return jnp.sum(y.astype(jnp.float32))

    x = jax.ShapeDtypeStruct((2, 128, 2, head_dim), dtype)
    mask = jax.ShapeDtypeStruct((2, 1, 128, 128), bool)
    bias = jax.ShapeDtypeStruct((1, 2, 128, 128), dtype)
    try:
        jax.jit(jax.grad(probe)).lower(x, mask, bias).compile()
    except Exception:  # whatever cuDNN's reason is, the plain path works
        return "xla"
    return "cudnn"
