"""LayerNorm and RMSNorm."""

from __future__ import annotations

from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Norm(nn.Module):
    """LayerNorm (Ba et al. 2016), or RMSNorm (Zhang & Sennrich 2019) without a bias.

    Statistics are in float32 whatever the compute type. The backward pass keeps the input alone and recomputes the
    rest, because the step is bound by memory bandwidth.
    """

    kind: Literal["layer", "rms"]
    eps: float
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "... hidden"]) -> Float[Array, "... hidden"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        if self.kind == "rms":
            return jax.checkpoint(self._rms)(x, scale)
        bias = self.param("bias", nn.initializers.zeros, scale.shape, jnp.float32)
        return jax.checkpoint(self._layer)(x, scale, bias)

    def _rms(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        x = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps) * scale
        return (x * scale).astype(self.dtype)

    def _layer(self, x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
        x = x.astype(jnp.float32)
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        return (x * (jax.lax.rsqrt(variance + self.eps) * scale) + bias).astype(self.dtype)
