"""Activation functions, by the names that configurations use.

The gradients are written out, so that the backward pass reads only the input and fuses with the matrix products around
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Scalars = Float[Array, "*shape"]


def _elementwise(function: Callable[[Scalars], Scalars], slope: Callable[[Scalars], Scalars]) -> Callable:
    """Return a function with its derivative; both compute in float32 and return the type of their argument."""
    @jax.custom_vjp
    def forward(x: Scalars) -> Scalars:
        return function(x.astype(jnp.float32)).astype(x.dtype)

    def backward(x: Scalars, dy: Scalars) -> tuple[Scalars]:
        # Without the barrier XLA shares tanh with the forward pass: on GPUs in memory, in float32.
        x = jax.lax.optimization_barrier(x)
        return ((dy.astype(jnp.float32) * slope(x.astype(jnp.float32))).astype(x.dtype),)

    forward.defvjp(lambda x: (forward(x), x), backward)
    return forward


def _gelu(x: Scalars) -> Scalars:
    return 0.5 * x * (1.0 + jax.lax.erf(x * math.sqrt(0.5)))


def _gelu_slope(x: Scalars) -> Scalars:
    return 0.5 * (1.0 + jax.lax.erf(x * math.sqrt(0.5))) + x * jnp.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)


_CUBIC, _SCALE = 0.044715, math.sqrt(2.0 / math.pi)


def _gelu_new(x: Scalars) -> Scalars:
    return 0.5 * x * (1.0 + jnp.tanh(_SCALE * (x + _CUBIC * x * x * x)))


def _gelu_new_slope(x: Scalars) -> Scalars:
    tanh = jnp.tanh(_SCALE * (x + _CUBIC * x * x * x))
    return 0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * _SCALE * (1.0 + 3.0 * _CUBIC * x * x)


def _silu_slope(x: Scalars) -> Scalars:
    sigmoid = jax.nn.sigmoid(x)
    return sigmoid * (1.0 + x * (1.0 - sigmoid))


gelu = _elementwise(_gelu, _gelu_slope)
"""x Φ(x) (Hendrycks & Gimpel 2016), by erf as in PyTorch."""
gelu_new = _elementwise(_gelu_new, _gelu_new_slope)
"""The tanh approximation of gelu in the released code of GPT-2 and BERT."""
silu = _elementwise(jax.nn.silu, _silu_slope)
"""x σ(x) (Elfwing et al. 2017), also called swish."""

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": gelu,
    "gelu_new": gelu_new,
    "relu": jax.nn.relu,
    "silu": silu,
    "gated-gelu": gelu_new,
    "gated-gelu-erf": gelu,
    "gated-silu": silu,
}
