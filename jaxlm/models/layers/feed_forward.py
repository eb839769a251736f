"""Feed-forward layer."""

from __future__ import annotations

import flax.linen as nn
from jaxtyping import Array, Float

from jaxlm.models.layers.activations import ACTIVATIONS
from jaxlm.models.layers.config import StackConfig, kernel_init
from jaxlm.models.layers.dense import Dense
from jaxlm.models.layers.dropout import dropout, module_key


class FeedForward(nn.Module):
    """Two matrices around an activation; three if it is gated: activation(x wi_0) ⊙ (x wi_1) (Shazeer 2020)."""

    config: StackConfig

    @nn.compact
    def __call__(self, x: Float[Array, "... hidden"], deterministic: bool = True) -> Float[Array, "... hidden"]:
        c = self.config

        def dense(name: str, features: int, residual: bool = False) -> Dense:
            return Dense(features, c.has_bias(name), c.dtype, kernel_init(c, residual=residual), name=name)

        activation = ACTIVATIONS[c.activation]
        if c.activation.startswith("gated"):
            gate, linear = (dense(name, c.intermediate_size)(x) for name in ("wi_0", "wi_1"))
            y = activation(gate) * linear
        else:
            y = activation(dense("wi", c.intermediate_size)(x))
        y = dropout(y, c.intermediate_dropout, module_key(self, c.intermediate_dropout, deterministic))
        return dense("wo", c.hidden_size, residual=True)(y)
