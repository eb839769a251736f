"""Activations in both compute types against float64."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlm.models.layers.activations import gelu, gelu_new, silu


def exact(x: float) -> float:
    return 0.5 * x * math.erfc(-x / math.sqrt(2))


def by_tanh(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def swish(x: float) -> float:
    return x / (1 + math.exp(-x))


@pytest.mark.parametrize(("ours", "formula"), [(gelu, exact), (gelu_new, by_tanh), (silu, swish)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_equal_float64_down_to_the_negative_tail(ours, formula, dtype):
    x = jnp.linspace(-4.0, 4.0, 801).astype(dtype)
    y = jax.jit(ours)(x)
    assert y.dtype == x.dtype
    expected = [formula(value) for value in np.asarray(x, np.float64)]
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=1e-2)


@pytest.mark.parametrize("ours", [gelu, gelu_new])
def test_the_backward_pass_keeps_the_input_alone(ours):
    """Shared with the forward pass, tanh or erf would be kept in float32, four bytes more for each element."""
    def loss(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jnp.sum((ours(x @ kernel) @ kernel) ** 2)

    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(x, x).compile().as_text()
    assert sum(compiled.count(f" {name}(") for name in ("tanh", "erf")) == 2


@pytest.mark.parametrize("ours", [gelu, gelu_new, silu])
def test_slopes_are_those_of_the_functions(ours):
    """Against differences in float32, to their rounding."""
    x = jnp.linspace(-6.0, 6.0, 401)
    slope = jax.jit(jax.vmap(jax.grad(ours)))(x)
    np.testing.assert_allclose(slope, (ours(x + 0.01) - ours(x - 0.01)) / 0.02, atol=1e-4)
