"""Feed-forward layer."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
from jaxtyping import Array, Float

from jaxlm.models.layers.activations import ACTIVATIONS
from jaxlm.models.layers.config import StackConfig, kernel_init
from jaxlm.models.layers.dropout import dropout, module_key


class FeedForward(nn.Module):
    """Two matrices around an activation; three if it is gated: activation(x wi_0) ⊙ (x wi_1) (Shazeer 2020)."""

    config: StackConfig

    @nn.compact
    def __call__(self, x: Float[Array, "... hidden"], deterministic: bool = True) -> Float[Array, "... hidden"]:
        c = self.config

        def dense(name: str, features: int, residual: bool = False, dot_general: Any = None) -> nn.Dense:
            init = kernel_init(c, residual=residual)
            return nn.Dense(
                features, use_bias=c.has_bias(name), dtype=c.dtype, name=name, kernel_init=init, dot_general=dot_general
            )

        activation = ACTIVATIONS[c.activation]
        if c.activation.startswith("gated"):
            gate, linear = (dense(name, c.intermediate_size, dot_general=dense_product)(x) for name in ("wi_0", "wi_1"))
            y = activation(gate) * linear
        else:
            y = activation(dense("wi", c.intermediate_size)(x))
        y = dropout(y, c.intermediate_dropout, module_key(self, c.intermediate_dropout, deterministic))
        return dense("wo", c.hidden_size, residual=True)(y)


def dense_product(x: jax.Array, kernel: jax.Array, dimensions: Any, precision: Any = None) -> jax.Array:
    """Return x @ kernel, whose kernel gradient is xᵀ gradient. The signature is that of `dot_general` in flax's Dense.

    jax computes that gradient as (gradientᵀ x)ᵀ. XLA's CPU compiler then transposes the gradient and recomputes the
    derivative of a gated activation in that layout, which takes a fifth of T5's step.
    """
    return _product(x, kernel)


@jax.custom_vjp
def _product(x: Float[Array, "*batch a"], kernel: Float[Array, "a b"]) -> Float[Array, "*batch b"]:
    return x @ kernel


def _backward(saved: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    rows = tuple(range(x.ndim - 1))
    # Not gradient @ kernel.T: the transpose of a sharded kernel would be gathered a second time.
    d_x = jax.lax.dot_general(gradient, kernel, (((gradient.ndim - 1,), (1,)), ((), ())))
    return d_x, jax.lax.dot_general(x, gradient, ((rows, rows), ((), ())))


_product.defvjp(lambda x, kernel: (x @ kernel, (x, kernel)), _backward)
