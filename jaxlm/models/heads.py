"""Small heads on top of a model: pure functions of parameters that an objective keeps under its own name."""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlm.models.layers.activations import ACTIVATIONS
from jaxlm.models.layers.config import StackConfig, kernel_init
from jaxlm.models.layers.embeddings import Table
from jaxlm.models.layers.norm import Norm
from jaxlm.models.layers.stack import call
from jaxlm.types import Params


@dataclasses.dataclass(frozen=True)
class LinearHead:
    """Dense layer to `features` logits. Parameters: `kernel`, `bias`."""

    stack: StackConfig
    features: int

    @property
    def module(self) -> nn.Module:
        """The Linen module of the head."""
        return nn.Dense(self.features, dtype=self.stack.dtype, kernel_init=kernel_init(self.stack))

    def init(self, key: jax.Array) -> Params:
        """Return fresh parameters, float32."""
        return self.module.init(key, jnp.zeros((1, self.stack.hidden_size)))["params"]

    def __call__(self, params: Params, x: Float[Array, "*batch hidden"]) -> Float[Array, "*batch features"]:
        """Return logits in float32."""
        return call(self.module, params, x).astype(jnp.float32)


class TwoLayers(nn.Module):
    """Dense layer, activation, dense layer."""

    head: TwoLayerHead

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        s = self.head.stack
        x = nn.Dense(s.hidden_size, dtype=s.dtype, kernel_init=kernel_init(s), name="dense")(x)
        x = ACTIVATIONS[s.activation](x)
        return nn.Dense(self.head.features, dtype=s.dtype, kernel_init=kernel_init(s), name="score")(x)


@dataclasses.dataclass(frozen=True)
class TwoLayerHead(LinearHead):
    """Dense layer, activation, and dense layer to `features` logits. Parameters: `dense`, `score`."""

    @property
    def module(self) -> nn.Module:
        return TwoLayers(self)


class Transform(nn.Module):
    """Dense layer, activation, LayerNorm."""

    head: TransformHead

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        s = self.head.stack
        x = nn.Dense(self.head.features, dtype=s.dtype, kernel_init=kernel_init(s), name="dense")(x)
        return Norm("layer", s.norm_eps, s.dtype, name="norm")(ACTIVATIONS[s.activation](x))


@dataclasses.dataclass(frozen=True)
class TransformHead(LinearHead):
    """Dense layer to `features`, activation and LayerNorm. Parameters: `dense`, `norm`."""

    @property
    def module(self) -> nn.Module:
        return Transform(self)

    def __call__(self, params: Params, x: Float[Array, "*batch hidden"]) -> Float[Array, "*batch features"]:
        """Return the features in the compute type."""
        return call(self.module, params, x)


class BoundaryModule(nn.Module):
    """Span boundary transform: twice dense, activation, LayerNorm of [left; right; offset embedding]."""

    head: BoundaryHead

    @nn.compact
    def __call__(self, left: jax.Array, right: jax.Array, offset: jax.Array) -> jax.Array:
        h, s = self.head, self.head.stack
        self.param("bias", nn.initializers.zeros, (h.vocab_size,), jnp.float32)
        embedded = Table(h.offsets, h.offset_size, kernel_init(s), s.dtype, name="offset")(offset)
        x = jnp.concatenate([left, right, embedded], axis=-1)
        for i, width in enumerate((s.hidden_size, h.features)):
            x = nn.Dense(width, dtype=s.dtype, kernel_init=kernel_init(s), name=f"dense_{i}")(x)
            x = Norm("layer", s.norm_eps, s.dtype, name=f"norm_{i}")(ACTIVATIONS[s.activation](x))
        return x


@dataclasses.dataclass(frozen=True)
class BoundaryHead:
    """Head of SpanBERT's span boundary objective (Joshi et al. 2019, section 3.2).

    Parameters: `offset`, `dense_0`, `norm_0`, `dense_1`, `norm_1`, and `bias`, of the vocabulary logits.

    Attributes:
        stack: Configuration of the model's layers.
        offsets: Number of offsets within a span.
        offset_size: Width of the offset embedding.
        features: Width of the result, which is that of the word embedding.
        vocab_size: Size of the bias.
    """

    stack: StackConfig
    offsets: int
    offset_size: int
    features: int
    vocab_size: int

    def init(self, key: jax.Array) -> Params:
        """Return fresh parameters, float32."""
        states = jnp.zeros((1, self.stack.hidden_size))
        return BoundaryModule(self).init(key, states, states, jnp.zeros(1, jnp.int32))["params"]

    def __call__(
        self, params: Params, left: Float[Array, "*batch hidden"], right: Float[Array, "*batch hidden"],
        offset: Int[Array, "*batch"],
    ) -> Float[Array, "*batch features"]:
        """Return the inputs of the word embedding as output matrix, to whose logits `params["bias"]` is added."""
        return call(BoundaryModule(self), params, left, right, offset)
