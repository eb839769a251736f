"""Transformer layers, and functions that run a stack of layers.

The parameters of equal layers are stacked: one array [layers, …] per kind, with kernels [layers, in, out]. Checkpoints,
sharding rules and the Transformers tables depend on these shapes and names.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxlm.models.layers.config import RematPolicy, StackConfig
from jaxlm.models.layers.dropout import dropout, module_key
from jaxlm.models.layers.feed_forward import FeedForward
from jaxlm.models.layers.multi_head import Cache, MultiHeadAttention, Visibility
from jaxlm.models.layers.norm import Norm
from jaxlm.parallel.activations import constrain
from jaxlm.types import Params

State = TypeVar("State")
Layer = Callable[[Any, State, Any], tuple[State, Any]]
"""(parameters, state, inputs of this layer) -> (state, output) of one layer."""

# "cheap" keeps the results of matrix products and what the backward pass of attention reads; "dots" does not keep the
# attention scores; "full" keeps only the input of a layer.
_policies = jax.checkpoint_policies
_products = _policies.checkpoint_dots_with_no_batch_dims
REMAT_POLICIES = {
    "cheap": _policies.save_from_both_policies(
        _products, _policies.save_only_these_names("attention", "attention_scores")
    ),
    "dots": _policies.save_from_both_policies(_products, _policies.save_only_these_names("attention")),
    "full": _policies.nothing_saveable,
}


def call(module: nn.Module, params: Params, *args: Any, key: jax.Array | None = None, **kwargs: Any) -> Any:
    """Apply a Linen module to its parameters; `key` is its dropout key."""
    return module.apply({"params": params}, *args, rngs=None if key is None else {"dropout": key}, **kwargs)


def init_layers(layer: Callable[[jax.Array], Params], key: jax.Array, num_layers: int) -> Params:
    """Return the stacked parameters of equal layers; `layer` initializes one of them from a key."""
    return jax.vmap(layer)(jax.random.split(key, num_layers))


def layer_keys(key: jax.Array | None, num_layers: int) -> jax.Array | None:
    """Return one dropout key per layer; None without a key."""
    return None if key is None else jax.random.split(key, num_layers)


def run_layers(
    layers: Sequence[Layer], params: Any, state: State, per_layer: Any = None, *, period: int = 1,
    remat: RematPolicy = "none", loop: bool = False,
) -> tuple[State, Any]:
    """Run `state, output = layers[i](params[i], state, per_layer[i])` for each layer i.

    Args:
        layers: The function of each layer. Equal layers have the same function object.
        params: Stacked parameters of all layers.
        state: Any pytree: hidden states, two streams, the two halves of reversible layers.
        per_layer: Stacked inputs that differ from layer to layer, such as dropout keys.
        period: Number of layers after which the kinds of layers recur. A loop runs one period per step; layers outside
            whole periods, such as a last one of its own, run by themselves.
        remat: What the backward pass recomputes.
        loop: Compile equal layers as a loop, which compiles faster. Unrolled layers save the copies into and out of
            the loop's stacks.

    Returns:
        The last state, and the stacked outputs of all layers.
    """
    segments = _segments(layers, period)
    parts = split_layers((params, per_layer), *(len(kinds) * repeats for kinds, repeats in segments))
    found = []
    for (kinds, repeats), part in zip(segments, parts, strict=True):
        state, outputs = _run_segment(kinds, part, state, repeats, remat, loop and repeats > 1)
        found.append(outputs)
    return state, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *found) if found else None


def _segments(layers: Sequence[Layer], period: int) -> list[tuple[Sequence[Layer], int]]:
    """Return the runs of equal periods, as the functions of one period and its repeats; other layers by themselves."""
    segments, start = [], 0
    while start < len(layers):
        kinds, repeats = layers[start : start + period], 1
        while layers[start + repeats * period : start + (repeats + 1) * period] == kinds:
            repeats += 1
        if repeats == 1:
            kinds = kinds[:1]
        segments.append((kinds, repeats))
        start += len(kinds) * repeats
    return segments


def _run_segment(
    kinds: Sequence[Layer], xs: tuple[Any, Any], state: State, repeats: int, remat: RematPolicy, loop: bool
) -> tuple[State, Any]:
    """Run the layers of a period `repeats` times; `xs` are their parameters and inputs."""
    if len(kinds) == 1:
        step = rematerialized(kinds[0], remat, loop)
    else:
        step = rematerialized(functools.partial(_run_each, kinds), remat, loop)
        xs = jax.tree.map(lambda leaf: leaf.reshape(repeats, len(kinds), *leaf.shape[1:]), xs)
    if loop:
        state, outputs = jax.lax.scan(lambda state, xs: step(xs[0], state, xs[1]), state, xs, length=repeats)
    else:
        state, outputs = _run_each([step] * repeats, xs[0], state, xs[1])
    if len(kinds) > 1:
        outputs = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), outputs)
    return state, outputs


def _run_each(layers: Sequence[Layer], params: Any, state: State, per_layer: Any) -> tuple[State, Any]:
    """Run layers one after the other, unrolled."""
    outputs = []
    for layer, xs in zip(layers, unstack((params, per_layer), len(layers)), strict=True):
        state, output = layer(xs[0], state, xs[1])
        outputs.append(output)
    return state, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)


def rematerialized(layer: Layer, remat: RematPolicy, loop: bool = False) -> Layer:
    """Return `layer` with the rematerialization policy `remat`."""
    if remat == "none":
        return layer
    # A loop cannot share results with the forward pass, so it needs no barriers against that.
    return jax.checkpoint(layer, policy=REMAT_POLICIES[remat], prevent_cse=not loop)


def split_layers(params: Any, *counts: int) -> list[Any]:
    """Split a stack into stacks of the given numbers of layers. The gradient is one concatenation."""
    if len(counts) == 1:
        return [params]
    leaves, tree = jax.tree.flatten(params)
    parts = [jax.lax.split(leaf, counts) for leaf in leaves]
    return [tree.unflatten([part[i] for part in parts]) for i in range(len(counts))]


def unstack(params: Any, num_layers: int | None = None) -> list[Any]:
    """Return the parameters of each layer of a stack; `num_layers` is needed if they may be without any array.

    Their gradients are joined by one concatenation. Unrolled, `jax.lax.scan` joins them by one update of the whole
    stack per layer, which took 2.8 of GPT-2's 84 ms on a v5e.
    """
    count = jax.tree.leaves(params)[0].shape[0] if num_layers is None else num_layers
    return [jax.tree.map(lambda leaf: leaf[0], part) for part in split_layers(params, *[1] * count)]


class SharedInputs(NamedTuple):
    """Inputs that all layers of a stack share, besides the hidden states."""

    visible: Visibility = Visibility()
    """Masks and bias of self-attention."""
    memory: Float[Array, "batch keys hidden"] | None = None
    """Encoder output, for cross-attention."""
    memory_visible: Visibility = Visibility()
    """Masks of cross-attention."""
    index: Any = None
    """Slot of the next token in the caches."""
    distances: Float[Array, "distances hidden"] | None = None
    """Vectors of relative distances, for disentangled attention (see `disentangled.RelativeTable`)."""


NO_INPUTS = SharedInputs()


class Block(nn.Module):
    """Transformer layer: self-attention, cross-attention if configured, feed-forward.

    Each sublayer has a residual connection, and a norm before it (pre), after both (post), or of its input and its
    output (both).
    """

    config: StackConfig
    deterministic: bool = True

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch length hidden"], shared: SharedInputs = NO_INPUTS,
        cache: dict[str, Cache] | None = None, positions: Int[Array, "batch selected"] | None = None,
        with_scores: bool = False, query: Float[Array, "batch length_or_selected hidden"] | None = None,
    ) -> tuple[Float[Array, "batch length_or_selected hidden"], Any]:
        """Return the hidden states, and the updated cache or the scores of self-attention.

        Args:
            x: Hidden states of all tokens.
            shared: Inputs that all layers share.
            cache: Caches of self-attention and cross-attention.
            positions: The only positions to compute and return; attention is over all tokens.
            with_scores: Return scale · q kᵀ in float32, before masks, bias and softmax.
            query: Hidden states of the queries, if they are not those of the tokens; for post-norm layers.
        """
        c = self.config
        old, new = cache or {}, {}

        def sublayer(name: str, function: Callable[[jax.Array], jax.Array], x: jax.Array, residual: jax.Array):
            norm = _norm(c, f"{name}_norm")
            is_plain = name == "attention" and not c.has_first_norm
            y = function(norm(x) if c.norm_placement != "post" and not is_plain else x)
            y = _norm(c, f"{name}_out_norm")(y) if c.norm_placement == "both" else y
            rate = {"mlp": c.mlp_dropout, "attention": c.attention_output_dropout}.get(name)
            rate = c.dropout if rate is None else rate
            y = residual + dropout(y, rate, module_key(self, rate, self.deterministic))
            return constrain(norm(y) if c.norm_placement == "post" else y)

        def self_attention(y: jax.Array) -> jax.Array:
            # The caller's mask has the causality of decoding, where queries and slots are not aligned.
            queries, source, visible = y, None, shared.visible
            if positions is not None:
                queries, source, visible = at_positions(y, positions), y, visible.at_queries(positions)
            queries, source = (queries, source) if query is None else (query, y)
            y, new["self"] = MultiHeadAttention(c, name="attention")(
                queries, source, visibility=visible, causal=c.causal and "self" not in old, cache=old.get("self"),
                index=shared.index, deterministic=self.deterministic, with_scores=with_scores, positions=positions,
                distances=shared.distances,
            )
            return y

        def cross_attention(y: jax.Array) -> jax.Array:
            y, new["cross"] = MultiHeadAttention(c, name="cross_attention")(
                y, shared.memory, visibility=shared.memory_visible, cache=old.get("cross"), cross=True,
                deterministic=self.deterministic,
            )
            return y

        residual = x if positions is None else at_positions(x, positions)
        x = sublayer("attention", self_attention, x, residual if query is None else query)
        if c.cross_attention:
            x = sublayer("cross_attention", cross_attention, x, x)
        x = sublayer("mlp", lambda y: (c.feed_forward or FeedForward)(c, name="mlp")(y, self.deterministic), x, x)
        return x, new["self"] if with_scores else new if cache else None


def init_stack(config: StackConfig, key: jax.Array) -> Params:
    """Return fresh parameters of a stack: `layers`, stacked by layer or group of layers, and `final_norm` if any."""
    x = jnp.zeros((1, 2, config.hidden_size), config.dtype)
    shared = SharedInputs(memory=x if config.cross_attention else None)
    # No fused kernel: jax cannot batch cuDNN's over the layers, and parameters do not depend on it.
    block = Block(dataclasses.replace(config, has_first_norm=True, attention="xla"))
    params = {"layers": init_layers(lambda key: block.init(key, x, shared)["params"], key, config.groups)}
    if not config.has_first_norm:
        params["layers"]["attention_norm"] = jax.tree.map(lambda leaf: leaf[1:], params["layers"]["attention_norm"])
    if config.final_norm:
        params["final_norm"] = _norm(config).init(key, x)["params"]
    return params


def run_stack(
    config: StackConfig, params: Params, x: Float[Array, "batch length hidden"], shared: SharedInputs = NO_INPUTS, *,
    key: jax.Array | None = None, caches: list[dict[str, Cache]] | None = None,
    positions: Int[Array, "batch selected"] | None = None, collect: bool = False,
) -> tuple[Float[Array, "batch length_or_selected hidden"], Any]:
    """Run a stack of blocks.

    Args:
        config: Configuration of the stack.
        params: Parameters from `init_stack`.
        x: Inputs of the first layer.
        shared: Inputs that all layers share.
        key: Dropout key; None turns dropout off.
        caches: Key/value caches of each layer (see `empty_cache`).
        positions: The only positions to return, of a stack without caches.
        collect: Return the inputs and the self-attention scores of all layers, each stacked.

    Returns:
        The last hidden states; and the updated caches, or the result of `collect`, or None.
    """
    x = constrain(x)
    stack = params["layers"]
    if not config.has_first_norm:  # a row for layer 0, which does not read it
        row = jax.tree.map(lambda leaf: jnp.pad(leaf, ((1, 0), (0, 0))), stack["attention_norm"])
        stack = stack | {"attention_norm": row}
    groups = unstack(stack) if config.groups < config.num_layers else None
    kinds = [(config.of_layer(i), groups and config.group_of(i)) for i in range(config.num_layers)]
    is_full = not config.causal and kinds[-1][0].band is None
    at_last = positions is not None and config.last_layer_at_positions and is_full and not collect

    def layer(
        block: Block, group: int | None, params: Params, x: jax.Array, key: jax.Array | None,
        positions: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        params = params if group is None else groups[group]
        y, scores = call(block, params, x, shared, None, positions, collect, key=key)
        return y, (x, scores) if collect else None

    if caches is not None:
        # Unrolled, with one cache per layer: stacked caches would be copied whole for every new token.
        outputs = []
        for i, cache in enumerate(caches):
            layer_params = jax.tree.map(lambda leaf, i=i: leaf[config.group_of(i)], stack)
            x, cache = call(Block(kinds[i][0], key is None), layer_params, x, shared, cache)
            outputs.append(cache)
    else:
        functions = {kind: functools.partial(layer, Block(kind[0], key is None), kind[1]) for kind in kinds}
        layers = [functions[kind] for kind in kinds]
        if at_last:
            layers[-1] = functools.partial(layers[-1], positions=pad_positions(positions))
        x, outputs = run_layers(
            layers, None if groups else stack, x, layer_keys(key, config.num_layers),
            period=1 if config.band is None else config.band_period, remat=config.remat, loop=config.loop_layers,
        )
    if positions is not None:
        x = x[:, : positions.shape[1]] if at_last else at_positions(x, positions)
    if config.final_norm:
        x = call(_norm(config), params["final_norm"], x)
    return x, outputs


def stack_flops(stack: StackConfig, length: int, memory: int = 0) -> float:
    """Return the FLOPs of one sequence's forward pass through a stack; `memory` is the length of the encoder output."""
    h, inner = stack.hidden_size, stack.num_heads * stack.head_dim
    matrices = 3 if stack.activation.startswith("gated") else 2
    kv = stack.kv_heads * stack.head_dim
    layer = length * (4 * h * (inner + kv) + 2 * matrices * h * stack.intermediate_size)
    if stack.cross_attention:
        layer += 4 * length * h * inner + 4 * memory * h * inner + 4 * length * memory * inner
    pairs = sum(_attended_pairs(stack.of_layer(i), length) for i in range(stack.num_layers))
    return float(stack.num_layers * layer + 4 * pairs * inner)


def _attended_pairs(layer: StackConfig, length: int) -> int:
    """Return the number of (query, key) pairs that count in a row: all without a band, and those in the band."""
    band = layer.band
    if band is None or band >= length:
        return length**2
    return length * band if layer.causal else length * (2 * band - 1) - band * (band - 1)


def _norm(config: StackConfig, name: str | None = None) -> Norm:
    return Norm(config.norm, config.norm_eps, config.dtype, config.has_bias("norm"), config.norm_offset, name=name)


def at_positions(
    x: Float[Array, "batch length hidden"], positions: Int[Array, "batch selected"]
) -> Float[Array, "batch selected hidden"]:
    """Select the hidden states at some positions of each row."""
    return jnp.take_along_axis(x, positions[..., None], axis=1)


def pad_positions(positions: Int[Array, "batch selected"]) -> Int[Array, "batch padded"]:
    """Return the positions that a last layer computes, padded with 0, whose hidden states the caller drops.

    cuDNN's attention computes no gradients for an odd number of queries.
    """
    return jnp.pad(positions, ((0, 0), (0, positions.shape[1] % 2)))
