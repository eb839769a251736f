"""LayerNorm and RMSNorm, with statistics in float32.

The gradients are written out, so that the backward pass keeps the input and one or two numbers per row. With
`jax.checkpoint` around norms and activations instead, the step of BERT-base with 2 layers takes 3.6 % longer on a v5e
by the compiler's estimate.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Norm(nn.Module):
    """LayerNorm (Ba et al. 2016), with or without bias, or RMSNorm (Zhang & Sennrich 2019), which has none."""

    kind: Literal["layer", "rms"]
    eps: float
    dtype: Any
    use_bias: bool = True
    offset: float = 0.0

    @nn.compact
    def __call__(self, x: Float[Array, "... hidden"]) -> Float[Array, "... hidden"]:
        init = nn.initializers.constant(1.0 - self.offset)
        scale = self.param("scale", init, (x.shape[-1],), jnp.float32) + self.offset
        is_centered, bias = self.kind == "layer", None
        if is_centered and self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, scale.shape, jnp.float32)
        return normalize(x, scale, bias, self.eps, self.dtype, is_centered)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def normalize(x, scale, bias, eps, dtype, is_centered=True):
    """Return (x - mean) / √(variance + eps) · scale + bias over the last axis, in `dtype`; a bias of None is zero.

    Not centered it is RMSNorm, x / √(mean(x²) + eps) · scale.
    """
    return _forward(x, scale, bias, eps, dtype, is_centered)[0]


def _forward(x, scale, bias, eps, dtype, is_centered):
    wide, mean = x.astype(jnp.float32), None
    if is_centered:
        mean = jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide - mean
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    y = wide * (inverse * scale)
    return (y if bias is None else y + bias).astype(dtype), (x, mean, inverse, scale, bias)


def _backward(eps, dtype, is_centered, saved, dy):
    x, mean, inverse, scale, bias = saved
    wide, dy = x.astype(jnp.float32), dy.astype(jnp.float32)

    def normalized(mean, inverse):
        return (wide if mean is None else wide - mean) * inverse

    y, d, rows = normalized(mean, inverse), dy * scale, tuple(range(x.ndim - 1))
    centered = d if mean is None else d - jnp.mean(d, axis=-1, keepdims=True)
    dx = inverse * (centered - y * jnp.mean(d * y, axis=-1, keepdims=True))
    # The barrier keeps XLA from sharing dy · y with dx, which takes a float32 array in a GPU's memory.
    d_scale = jnp.sum(dy * normalized(*jax.lax.optimization_barrier((mean, inverse))), axis=rows)
    return dx.astype(x.dtype), d_scale, None if bias is None else jnp.sum(dy, axis=rows)


normalize.defvjp(_forward, _backward)
