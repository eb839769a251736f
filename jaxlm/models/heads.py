"""Small heads on top of a model, whose parameters an objective keeps under its own name."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlm.models.layers.activations import ACTIVATIONS
from jaxlm.models.layers.config import StackConfig, kernel_init
from jaxlm.models.layers.dense import Dense
from jaxlm.models.layers.embeddings import EmbeddingTable
from jaxlm.models.layers.norm import Norm
from jaxlm.types import Params


class Head(nn.Module):
    """Head with `features` outputs per hidden state. `models.layers.stack.call` applies one to its parameters."""

    stack: StackConfig
    features: int

    def init_params(self, key: jax.Array) -> Params:
        """Return fresh parameters, float32."""
        return self.init(key, jnp.zeros((1, self.stack.hidden_size)))["params"]

    def dense(self, features: int, name: str | None = None, use_bias: bool = True) -> Dense:
        """Return a dense layer. For `setup` and compact methods."""
        return Dense(features, use_bias, self.stack.dtype, kernel_init(self.stack), name=name)

    def transform(self, x: Float[Array, "*batch hidden"], features: int, suffix: str = "") -> jax.Array:
        """Apply a dense layer, the activation and LayerNorm. For compact methods."""
        s = self.stack
        x = ACTIVATIONS[s.activation](self.dense(features, f"dense{suffix}", s.has_bias("dense"))(x))
        return Norm("layer", s.norm_eps, s.dtype, s.has_bias("norm"), name=f"norm{suffix}")(x)


class LinearHead(Head):
    """Dense layer to float32 logits. Parameters: `kernel`, `bias`."""

    def setup(self) -> None:
        self.layer = self.dense(self.features)
        nn.share_scope(self, self.layer)

    def __call__(self, x: Float[Array, "*batch hidden"]) -> Float[Array, "*batch features"]:
        return self.layer(x).astype(jnp.float32)


class TwoLayerHead(Head):
    """Dense layer, activation, and dense layer to float32 logits. Parameters: `dense`, `score`."""

    @nn.compact
    def __call__(self, x: Float[Array, "*batch hidden"]) -> Float[Array, "*batch features"]:
        s = self.stack
        x = ACTIVATIONS[s.activation](self.dense(s.hidden_size, "dense")(x))
        return self.dense(self.features, "score")(x).astype(jnp.float32)


class TransformHead(Head):
    """Dense layer, activation and LayerNorm, in the compute type. Parameters: `dense`, `norm`."""

    @nn.compact
    def __call__(self, x: Float[Array, "*batch hidden"]) -> Float[Array, "*batch features"]:
        return self.transform(x, self.features)


class BoundaryHead(Head):
    """Head of SpanBERT's span boundary objective (Joshi et al. 2019, section 3.2).

    Twice a dense layer, activation and LayerNorm, of [left; right; offset embedding]. Parameters: `offset`, `dense_0`,
    `norm_0`, `dense_1`, `norm_1`, and `bias`, of the vocabulary logits. `features` is the width of the word embedding,
    which is the output matrix.
    """

    vocab_size: int
    offsets: int
    """Number of offsets within a span."""
    offset_size: int
    """Width of the offset embedding."""

    def init_params(self, key: jax.Array) -> Params:
        states = jnp.zeros((1, self.stack.hidden_size))
        return self.init(key, states, states, jnp.zeros(1, jnp.int32))["params"]

    @nn.compact
    def __call__(
        self, left: Float[Array, "*batch hidden"], right: Float[Array, "*batch hidden"], offset: Int[Array, "*batch"]
    ) -> Float[Array, "*batch features"]:
        s = self.stack
        self.param("bias", nn.initializers.zeros, (self.vocab_size,), jnp.float32)
        embedded = EmbeddingTable(self.offsets, self.offset_size, kernel_init(s), s.dtype, name="offset")(offset)
        x = jnp.concatenate([left, right, embedded], axis=-1)
        return self.transform(self.transform(x, s.hidden_size, "_0"), self.features, "_1")
