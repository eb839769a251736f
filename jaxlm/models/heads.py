"""Small heads on top of a model, as values: pure functions of parameters that an objective keeps under its own name."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlm.models.layers.activations import ACTIVATIONS
from jaxlm.models.layers.config import StackConfig, kernel_init

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class LinearHead:
    """One dense layer to `features` logits. Parameters: `kernel`, `bias`."""

    stack: StackConfig
    features: int

    def init(self, key: jax.Array) -> Params:
        """Fresh parameters, float32."""
        return self._dense.init(key, jnp.zeros((1, self.stack.hidden_size)))["params"]

    def __call__(self, params: Params, x: Float[Array, "*batch hidden"]) -> Float[Array, "*batch features"]:
        """Logits in float32."""
        return self._dense.apply({"params": params}, x).astype(jnp.float32)

    @property
    def _dense(self) -> nn.Dense:
        return nn.Dense(self.features, dtype=self.stack.dtype, kernel_init=kernel_init(self.stack))


@dataclasses.dataclass(frozen=True)
class TwoLayerHead:
    """dense, activation, dense to `features` logits. Parameters: `dense`, `score`."""

    stack: StackConfig
    features: int

    def init(self, key: jax.Array) -> Params:
        """Fresh parameters, float32."""
        return self._module.init(key, jnp.zeros((1, self.stack.hidden_size)))["params"]

    def __call__(self, params: Params, x: Float[Array, "*batch hidden"]) -> Float[Array, "*batch features"]:
        """Logits in float32."""
        return self._module.apply({"params": params}, x).astype(jnp.float32)

    @property
    def _module(self) -> nn.Module:
        return _TwoLayers(self.stack, self.features)


class _TwoLayers(nn.Module):
    stack: StackConfig
    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        s = self.stack
        x = nn.Dense(s.hidden_size, dtype=s.dtype, kernel_init=kernel_init(s), name="dense")(x)
        x = ACTIVATIONS[s.activation](x)
        return nn.Dense(self.features, dtype=s.dtype, kernel_init=kernel_init(s), name="score")(x)
