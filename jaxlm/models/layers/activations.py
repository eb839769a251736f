"""Activation functions by the names that configurations use."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.checkpoint
def gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """x Φ(x), exactly (Hendrycks & Gimpel 2016), by erf as PyTorch computes it.

    Computed in float32: in bfloat16 the sum 1 + erf loses the function's negative tail. The backward pass keeps the
    input alone and recomputes the rest.
    """
    wide = x.astype(jnp.float32)
    return (0.5 * wide * (1.0 + jax.lax.erf(wide * math.sqrt(0.5)))).astype(x.dtype)


@jax.checkpoint
def gelu_new(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The tanh approximation of gelu, as in the code of GPT-2 and BERT; in float32, like gelu."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": gelu,
    "gelu_new": gelu_new,
    "relu": jax.nn.relu,
    "gated-gelu": gelu_new,
}
