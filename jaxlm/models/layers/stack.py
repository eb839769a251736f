"""The Transformer stack that every family shares: attention and feed-forward blocks, scanned over the layers.

A family's file adds embeddings, heads and published sizes. Parameter names here are a contract with checkpoints,
sharding rules and the Transformers export: every kernel is [in, out] (with the layer in front, from the scan).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxlm.models.layers.attention import attend
from jaxlm.models.layers.dropout import dropout
from jaxlm.models.layers.placement import devices, place

PlainActivation = Literal["gelu", "gelu_new", "relu"]
Activation = Literal[PlainActivation, "gated-gelu"]
RematPolicy = Literal["none", "dots", "full"]
AttentionKind = Literal["auto", "xla", "cudnn"]
DType = Literal["float32", "bfloat16"]


@jax.checkpoint
def gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """x Φ(x), exactly (Hendrycks & Gimpel 2016). By erf, as PyTorch computes it: jax.nn.gelu's erfc is better only
    where x Φ(x) is below 1e-6, and on a CPU it costs as much as the matrix product before it.

    In float32 whatever the type: in bfloat16 the sum loses the small values of erf + 1, which is the negative tail."""
    wide = x.astype(jnp.float32)
    return (0.5 * wide * (1.0 + jax.lax.erf(wide * math.sqrt(0.5)))).astype(x.dtype)


@jax.checkpoint
def gelu_new(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """gelu's approximation by tanh, as in the code of GPT-2 and BERT; in float32, as gelu."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": gelu,
    "gelu_new": gelu_new,
    "relu": jax.nn.relu,
    "gated-gelu": gelu_new,
}

# What a layer keeps for its backward pass: everything, the results of matrix products, or only its input.
REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims,
    "full": jax.checkpoint_policies.nothing_saveable,
}

WRITTEN_OUT_ON_CPU = 8
"""Layers up to which a CPU's program repeats the layer instead of looping: what the loop stacks up for the backward
pass is written once less, a tenth of a step. Deeper stacks would take long to compile."""


@dataclasses.dataclass(frozen=True)
class StackConfig:
    """The orthogonal choices in which the families' stacks differ; a family's configuration makes one of these."""

    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    activation: Activation = "gelu"
    norm: Literal["layer", "rms"] = "layer"
    norm_placement: Literal["post", "pre"] = "post"
    norm_eps: float = 1e-12
    final_norm: bool = False
    use_bias: bool = True
    causal: bool = False
    cross_attention: bool = False
    scale_attention: bool = True
    dropout: float = 0.1
    attention_dropout: float = 0.1
    intermediate_dropout: float = 0.0
    init: Literal["truncated_normal", "normal", "fan_in"] = "truncated_normal"
    init_std: float = 0.02
    residual_init_scale: float = 1.0
    dtype: DType = "float32"
    remat: RematPolicy = "none"
    attention: AttentionKind = "auto"

    @property
    def attention_scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim) if self.scale_attention else 1.0


def kernel_init(config: StackConfig, *, residual: bool = False, query: bool = False) -> nn.initializers.Initializer:
    """The family's law for a weight matrix; `residual` marks the matrices that write to the residual stream."""
    scale = config.residual_init_scale if residual else 1.0
    if config.init == "fan_in":  # T5: 1/√fan_in, with the missing 1/√head_dim of attention folded into the query.
        scale *= 1.0 / config.head_dim if query else 1.0
        return nn.initializers.variance_scaling(scale, "fan_in", "normal")
    if config.init == "normal":
        return nn.initializers.normal(config.init_std * scale)
    # TensorFlow's truncated normal: cut at two standard deviations and not rescaled (jax's own would rescale).
    return nn.initializers.truncated_normal(config.init_std * scale, lower=-2.0, upper=2.0)


def matrix_product(config: StackConfig) -> Callable[..., jax.Array] | None:
    """What multiplies activations with a kernel, for `nn.Dense(dot_general=…)`; None is flax's own.

    On a CPU the kernel's gradient reads the longer of the two activations as it lies: as jax differentiates the
    product, XLA makes a transposed copy of it. Remat policies do not see into it, so they go without.
    """
    if devices().platform != "cpu" or config.remat != "none":
        return None
    return lambda x, kernel, *_, **__: _product(x, kernel)


@jax.custom_vjp
def _product(x, kernel):
    return jnp.einsum("...i,io->...o", x, kernel)


def _product_backward(saved, gradient):
    x, kernel = saved
    d_x = jnp.einsum("...o,io->...i", gradient, kernel)
    if kernel.shape[0] <= kernel.shape[1]:
        return d_x, jnp.einsum("...i,...o->io", x, gradient)
    return d_x, jnp.einsum("...o,...i->oi", gradient, x).T


_product.defvjp(lambda x, kernel: (_product(x, kernel), (x, kernel)), _product_backward)


class Norm(nn.Module):
    """LayerNorm, or RMSNorm without a bias; statistics in float32 whatever the compute type.

    The backward pass keeps the input alone: the rest is a few operations on what it reads anyway, and memory is what
    this costs. The same holds for gelu.
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


class Attention(nn.Module):
    """Multi-head attention with biases or without: of x over itself, or over `memory` when that is given.

    With a cache ({"key", "value"}: [batch, slots, heads, head_dim]) the new keys and values go to slots
    index..index+queries and attention is over all slots; the caller's mask says which are filled.
    For cross-attention a cache without memory is read, and with memory is filled.
    """

    config: StackConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch queries hidden"],
        memory: Float[Array, "batch keys hidden"] | None = None,
        *,
        mask: Bool[Array, "#batch #heads #queries keys"] | None,
        bias: Float[Array, "#batch heads queries keys"] | None = None,
        causal: bool = False,
        cache: dict[str, jax.Array] | None = None,
        index: jax.Array | None = None,
        cross: bool = False,
        deterministic: bool = True,
    ) -> tuple[Float[Array, "batch queries hidden"], dict[str, jax.Array] | None]:
        c = self.config
        inner = c.num_heads * c.head_dim

        def project(name: str, inputs: jax.Array) -> jax.Array:
            dense = nn.Dense(
                inner, use_bias=c.use_bias, dtype=c.dtype, name=name, dot_general=matrix_product(c),
                kernel_init=kernel_init(c, query=name == "query"),
            )
            return dense(inputs).reshape(*inputs.shape[:-1], c.num_heads, c.head_dim)

        query = project("query", x)
        if cross and memory is None:
            assert cache is not None
            key, value = cache["key"], cache["value"]
        else:
            source = x if memory is None else memory
            key, value = project("key", source), project("value", source)
            if cache is not None and cross:
                cache = {"key": key, "value": value}
            elif cache is not None:
                key = jax.lax.dynamic_update_slice_in_dim(cache["key"], key.astype(cache["key"].dtype), index, 1)
                value = jax.lax.dynamic_update_slice_in_dim(
                    cache["value"], value.astype(cache["value"].dtype), index, 1
                )
                cache = {"key": key, "value": value}
        y = attend(
            query, key, value,
            mask=mask,
            bias=bias,
            causal=causal,
            scale=c.attention_scale,
            dropout_rate=c.attention_dropout,
            dropout_key=_dropout_key(self, deterministic or c.attention_dropout == 0),
            implementation=c.attention,
        )
        y = y.reshape(*x.shape[:-1], inner)
        out = nn.Dense(
            c.hidden_size, use_bias=c.use_bias, dtype=c.dtype, name="out", dot_general=matrix_product(c),
            kernel_init=kernel_init(c, residual=True),
        )
        return out(y), cache


class FeedForward(nn.Module):
    """Two matrices around an activation; three when it is gated (`gelu(x wi_0) ⊙ (x wi_1)`, Shazeer 2020)."""

    config: StackConfig

    @nn.compact
    def __call__(self, x: Float[Array, "... hidden"], deterministic: bool = True) -> Float[Array, "... hidden"]:
        c = self.config

        def dense(name: str, features: int, residual: bool = False) -> nn.Dense:
            init = kernel_init(c, residual=residual)
            return nn.Dense(
                features, use_bias=c.use_bias, dtype=c.dtype, name=name, dot_general=matrix_product(c), kernel_init=init
            )

        activation = ACTIVATIONS[c.activation]
        if c.activation.startswith("gated"):
            inner = activation(dense("wi_0", c.intermediate_size)(x)) * dense("wi_1", c.intermediate_size)(x)
        else:
            inner = activation(dense("wi", c.intermediate_size)(x))
        inner = dropout(inner, c.intermediate_dropout, _dropout_key(self, deterministic or not c.intermediate_dropout))
        return dense("wo", c.hidden_size, residual=True)(inner)


class Block(nn.Module):
    """One layer: self-attention, cross-attention if the stack has it, feed-forward; a norm before or after each.

    With positions [batch, few] all tokens are attended to, but only those places are computed and returned.
    """

    config: StackConfig
    deterministic: bool = True

    @nn.compact
    def __call__(self, x, cache, memory, mask, memory_mask, bias, index, positions=None):
        c = self.config
        cache = cache or {}
        new_cache = {}

        def sublayer(x: jax.Array, name: str, inner: Callable[[jax.Array], jax.Array], select=lambda x: x) -> jax.Array:
            norm = Norm(c.norm, c.norm_eps, c.dtype, name=f"{name}_norm")
            y = inner(norm(x) if c.norm_placement == "pre" else x)
            y = select(x) + dropout(y, c.dropout, _dropout_key(self, self.deterministic or c.dropout == 0))
            return place(norm(y) if c.norm_placement == "post" else y)

        def selected(y: jax.Array) -> jax.Array:
            return y if positions is None else at_positions(y, positions)

        def self_attention(y: jax.Array) -> jax.Array:
            # While decoding from a cache the caller's mask says everything; queries and slots are not aligned.
            causal = c.causal and "self" not in cache
            y, new_cache["self"] = Attention(c, name="attention")(
                selected(y), None if positions is None else y, mask=mask, bias=bias, causal=causal,
                cache=cache.get("self"), index=index, deterministic=self.deterministic,
            )
            return y

        def cross_attention(y: jax.Array) -> jax.Array:
            y, new_cache["cross"] = Attention(c, name="cross_attention")(
                y, memory, mask=memory_mask, cache=cache.get("cross"), cross=True, deterministic=self.deterministic
            )
            return y

        x = sublayer(x, "attention", self_attention, selected)
        if c.cross_attention:
            x = sublayer(x, "cross_attention", cross_attention)
        x = sublayer(x, "mlp", lambda y: FeedForward(c, name="mlp")(y, self.deterministic))
        return x, (new_cache if cache else None)


class Stack(nn.Module):
    """`num_layers` blocks; parameters carry the layer as their first dimension, so that one block can be scanned."""

    config: StackConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch length hidden"],
        *,
        mask: Bool[Array, "#batch #heads #queries keys"] | None = None,
        bias: Float[Array, "#batch heads queries keys"] | None = None,
        memory: Float[Array, "batch memory hidden"] | None = None,
        memory_mask: Bool[Array, "#batch #heads #queries memory"] | None = None,
        cache: Any = None,
        index: jax.Array | None = None,
        positions: Int[Array, "batch positions"] | None = None,
        deterministic: bool = True,
    ) -> tuple[Float[Array, "batch length_or_positions hidden"], Any]:
        """Returns hidden states and the updated cache (None without one).

        positions: the only places whose last hidden states are wanted, for stacks without causality, biases or a
        cache, and with a mask that is the same for all queries.
        """
        c = self.config
        if positions is not None:
            assert bias is None and cache is None and not c.causal and (mask is None or mask.shape[-2] == 1)
        block = Block(c, deterministic, parent=None)

        def layer(x, xs, positions=None):
            params, old_cache, key = xs
            rngs = None if key is None else {"dropout": key}
            inputs = (place(x), old_cache, memory, mask, memory_mask, bias, index, positions)
            return block.apply({"params": params}, *inputs, rngs=rngs)

        if self.is_initializing():
            def init(key):
                return Block(c, parent=None).init(key, x, cache, memory, mask, memory_mask, bias, index)["params"]

            self.param("layers", lambda key: jax.vmap(init)(jax.random.split(key, c.num_layers)))
        params = self.variables["params"]["layers"]
        keys = None if deterministic else jax.random.split(self.make_rng("dropout"), c.num_layers)
        if c.remat != "none":
            loop = jax.checkpoint(layer, policy=REMAT_POLICIES[c.remat], prevent_cse=False)
            x, cache = jax.lax.scan(loop, x, (params, cache, keys))
        elif devices().platform != "cpu" or c.num_layers > WRITTEN_OUT_ON_CPU:
            x, cache = jax.lax.scan(layer, x, (params, cache, keys))
        else:
            # Written out, of the last layer only what is asked for: its other places would be read by nobody. (A last
            # layer apart from a loop would mean to copy all other layers' parameters out of the whole. With remat the
            # compiler could merge what is computed again with what it was to save, without the loop.)
            split = jax.tree.map(lambda p: jax.lax.split(p, [1] * c.num_layers), params)  # its gradient is one array
            caches = []
            for number in range(c.num_layers):
                own = jax.tree.map(lambda p, parts, n=number: parts[n][0], params, split)
                old, key = jax.tree.map(lambda p, n=number: p[n], (cache, keys))
                x, new = layer(x, (own, old, key), positions if number == c.num_layers - 1 else None)
                caches.append(new)
            cache, positions = jax.tree.map(lambda *layers: jnp.stack(layers), *caches), None
        if positions is not None:
            x = at_positions(x, positions)
        if c.final_norm:
            x = Norm(c.norm, c.norm_eps, c.dtype, name="final_norm")(x)
        return x, cache


def at_positions(
    x: Float[Array, "batch length hidden"], positions: Int[Array, "batch positions"]
) -> Float[Array, "batch positions hidden"]:
    """The hidden states at some places of each row."""
    return jnp.take_along_axis(x, positions[..., None], axis=1)


def empty_cache(config: StackConfig, batch: int, slots: int, memory_length: int = 0) -> dict[str, Any]:
    """Zeroed keys and values for `Stack`: self-attention over `slots`, cross-attention over `memory_length`."""

    def pair(length: int) -> dict[str, jax.Array]:
        shape = (config.num_layers, batch, length, config.num_heads, config.head_dim)
        return {"key": jnp.zeros(shape, config.dtype), "value": jnp.zeros(shape, config.dtype)}

    cache = {"self": pair(slots)}
    if config.cross_attention:
        cache["cross"] = pair(memory_length)
    return cache


def _dropout_key(module: nn.Module, deterministic: bool) -> jax.Array | None:
    return None if deterministic else module.make_rng("dropout")
