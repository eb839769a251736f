"""Transformer layers and the function that runs a stack of them.

Parameter names are a contract with checkpoints, sharding rules and the Transformers tables: every kernel is [in, out],
and layer i of a stack is `layers/i`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
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

State = TypeVar("State")
Layer = Callable[[Any, State, Any], tuple[State, Any]]

# What a layer keeps for its backward pass: the results of matrix products and what attention needs; that without the
# scores of attention and the bits of its dropout; nothing but its input.
_policies = jax.checkpoint_policies
_products = _policies.checkpoint_dots_with_no_batch_dims
REMAT_POLICIES = {
    "cheap": _policies.save_from_both_policies(
        _products, _policies.save_only_these_names("attention", "attention_scores", "dropout_bits")
    ),
    "dots": _policies.save_from_both_policies(_products, _policies.save_only_these_names("attention")),
    "full": _policies.nothing_saveable,
}


def run_layers(
    layer: Layer | Sequence[Layer], params: Sequence[Any], state: State, inputs: Sequence[Any], *,
    remat: RematPolicy = "none", loop: bool = False,
) -> tuple[State, list[Any]]:
    """Runs `state, output = layer(params[i], state, inputs[i])` for each i; returns the state and all outputs. Of n
    functions layer i runs number i mod n; n divides the number of layers.

    state: any pytree (hidden states; two streams; the two halves of reversible layers). inputs: what differs from
    layer to layer, such as dropout keys and caches. With `loop` the layers are one `jax.lax.scan`, which compiles
    sooner and needs equal shapes in all layers; written out, nothing is copied into and out of the loop's stacks.
    """
    turns = [layer] if callable(layer) else list(layer)
    if remat != "none":
        # In a loop nothing can be merged with the forward pass, so the barriers against it are left out.
        turns = [jax.checkpoint(one, policy=REMAT_POLICIES[remat], prevent_cse=not loop) for one in turns]

    def run(state: State, xs: Sequence[Any]) -> tuple[State, list[Any]]:
        outputs = []
        for one, (own, own_inputs) in zip(itertools.cycle(turns), xs, strict=False):
            state, output = one(own, state, own_inputs)
            outputs.append(output)
        return state, outputs

    each = list(zip(params, inputs, strict=True))
    if loop and len(each) > len(turns):
        periods = [each[i : i + len(turns)] for i in range(0, len(each), len(turns))]
        state, outputs = jax.lax.scan(run, state, jax.tree.map(lambda *leaves: jnp.stack(leaves), *periods))
        return state, [jax.tree.map(lambda leaf, i=i: leaf[i], one) for i in range(len(periods)) for one in outputs]
    return run(state, each)


def init_layers(init: Callable[[jax.Array], Any], key: jax.Array, count: int) -> list[Any]:
    """The parameters of `count` layers, each from a key of its own, by one program: compiled once, however many there
    are."""
    stacked = jax.vmap(init)(jax.random.split(key, count))
    return [jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(count)]


class Coupling(NamedTuple):
    """A reversible layer (Gomez et al. 2017): y1 = x1 + first(x2), y2 = x2 + second(y1).

    first: (params, x2, own inputs, shared inputs, kept) -> (change, kept). `kept` is None at first; the backward pass
    hands in what the forward pass gave out, where rounding must not decide anew (which bucket a vector falls into).
    second: (params, y1, own inputs, shared inputs) -> change.
    """

    first: Callable[[Any, jax.Array, Any, Any, Any], tuple[jax.Array, Any]]
    second: Callable[[Any, jax.Array, Any, Any], jax.Array]


def run_reversible(
    layers: Sequence[Coupling], params: Sequence[Any], state: tuple[jax.Array, jax.Array], inputs: Sequence[Any],
    shared: Any, *, loop: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Runs couplings over a pair of streams by `run_layers`: of n couplings layer i is number i mod n. The backward
    pass computes each layer's inputs from its outputs, so that what is kept does not grow with depth, but for `kept`
    (Kitaev et al. 2020, section 3). inputs, shared: without gradients; what differs from layer to layer, and what does
    not."""
    return _reversible(tuple(layers), loop, list(params), state, list(inputs), shared)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _reversible(layers, loop, params, state, inputs, shared):
    return reversible_forward(layers, loop, params, state, inputs, shared)[0]


def reversible_forward(layers, loop, params, state, inputs, shared):
    """(streams after the layers, what the backward pass reads). Differentiated as it stands, it is a plain stack."""
    def forward(layer, params, state, own):
        x1, x2 = state
        change, kept = layer.first(params, x2, own, shared, None)
        y1 = constrain(x1 + change)
        return (y1, constrain(x2 + layer.second(params, y1, own, shared))), kept

    turns = [functools.partial(forward, layer) for layer in layers]
    state, kept = run_layers(turns, params, state, inputs, loop=loop)
    return state, (params, state, inputs, shared, kept)


def _reversible_backward(layers, loop, saved, gradient):
    params, state, inputs, shared, kept = saved

    def backward(layer, params, carry, inputs):
        (y1, y2), (dy1, dy2), (own, kept) = *carry, inputs
        change, vjp = jax.vjp(lambda params, y: layer.second(params, y, own, shared), params, y1)
        d_second, dy = vjp(dy2)
        x2, dy1 = constrain(y2 - change), dy1 + dy
        change, vjp = jax.vjp(lambda params, x: layer.first(params, x, own, shared, kept)[0], params, x2)
        d_first, dx = vjp(dy1)
        carry = (constrain(y1 - change), x2), (dy1, dy2 + dx)
        # One layer after the other: what a gradient is computed from would else be held until all layers are done.
        return jax.lax.optimization_barrier((carry, jax.tree.map(jnp.add, d_first, d_second)))

    turns = [functools.partial(backward, layer) for layer in layers[::-1]]
    own = list(zip(inputs, kept, strict=True))
    (_, gradient), d_params = run_layers(turns, params[::-1], (state, gradient), own[::-1], loop=loop)
    return d_params[::-1], gradient, None, None


_reversible.defvjp(reversible_forward, _reversible_backward)


class LayerInputs(NamedTuple):
    """What all layers of a stack read besides the hidden states."""

    visible: Visibility = Visibility()
    memory: Float[Array, "batch keys hidden"] | None = None
    memory_visible: Visibility = Visibility()
    index: Any = None


NOTHING = LayerInputs()


class Collected(NamedTuple):
    """What a layer read and computed: the hidden states that entered it, and the scores of its self-attention, scale ·
    q kᵀ in float32, before masks, bias and softmax."""

    hidden: Float[Array, "batch length hidden"]
    scores: Float[Array, "batch heads length length"]


class Block(nn.Module):
    """One layer: self-attention, cross-attention if the stack has it, feed-forward, each with a residual connection and
    a norm before it (pre) or after it (post).

    With positions [batch, few], attention is over all tokens, but only those places are computed and returned.
    """

    config: StackConfig
    deterministic: bool = True

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch length hidden"], inputs: LayerInputs, cache: dict[str, Cache] | None = None,
        positions: Int[Array, "batch few"] | None = None,
    ) -> tuple[Float[Array, "batch length_or_few hidden"], dict[str, Cache] | None]:
        c = self.config
        new_cache: dict[str, Any] = {}
        old_cache = cache or {}

        def sublayer(name: str, function: Callable[[jax.Array], jax.Array], x: jax.Array, residual: jax.Array):
            norm = Norm(c.norm, c.norm_eps, c.dtype, name=f"{name}_norm")
            y = function(norm(x) if c.norm_placement == "pre" else x)
            y = residual + dropout(y, c.dropout, module_key(self, c.dropout, self.deterministic))
            return constrain(norm(y) if c.norm_placement == "post" else y)

        def self_attention(y: jax.Array) -> jax.Array:
            # While decoding from a cache the caller's mask says everything: queries and slots are not aligned.
            query, source = (y, None) if positions is None else (at_positions(y, positions), y)
            y, new_cache["self"] = MultiHeadAttention(c, name="attention")(
                query, source, visibility=inputs.visible, causal=c.causal and "self" not in old_cache,
                cache=old_cache.get("self"), index=inputs.index, deterministic=self.deterministic,
            )
            return y

        def cross_attention(y: jax.Array) -> jax.Array:
            y, new_cache["cross"] = MultiHeadAttention(c, name="cross_attention")(
                y, inputs.memory, visibility=inputs.memory_visible, cache=old_cache.get("cross"), cross=True,
                deterministic=self.deterministic,
            )
            return y

        x = sublayer("attention", self_attention, x, x if positions is None else at_positions(x, positions))
        if c.cross_attention:
            x = sublayer("cross_attention", cross_attention, x, x)
        x = sublayer("mlp", lambda y: FeedForward(c, name="mlp")(y, self.deterministic), x, x)
        return x, (new_cache if cache else None)


class Stack(nn.Module):
    """A stack of blocks. Its parameters are `layers/0`, `layers/1`, …, one entry for each group of layers that share
    them (ALBERT), or for each layer."""

    config: StackConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch length hidden"],
        inputs: LayerInputs = NOTHING,
        *,
        caches: list[dict[str, Cache]] | None = None,
        positions: Int[Array, "batch few"] | None = None,
        collect: bool = False,
        deterministic: bool = True,
    ) -> tuple[Float[Array, "batch length_or_few hidden"], Any]:
        """Returns the last hidden states and the updated caches (None without).

        positions: the only places whose last hidden states are wanted; for stacks without causality, biases or caches,
        and masks that are the same for all queries. collect: return a `Collected` of each layer instead of the caches.
        """
        c = self.config
        kinds = [c] if c.band is None else [dataclasses.replace(c, band=None), c]
        blocks = [Block(kind, deterministic, parent=None) for kind in kinds]
        params = self._layer_params(x, inputs)
        keys = [None] * c.num_layers
        if not deterministic:
            keys = list(jax.random.split(self.make_rng("dropout"), c.num_layers))
        layer_inputs = list(zip(keys, caches or [None] * c.num_layers, strict=True))

        def layer(params: Any, x: jax.Array, own: Any, positions: jax.Array | None = None, block: Block = blocks[-1]):
            key, cache = own
            rngs = None if key is None else {"dropout": key}
            if not collect:
                return block.apply({"params": params}, x, inputs, cache, positions, rngs=rngs)
            (y, _), made = block.apply({"params": params}, x, inputs, rngs=rngs, mutable=["collected"])
            return y, Collected(x, made["collected"]["attention"]["scores"][0])

        x = constrain(x)
        last = positions is not None and c.last_layer_at_positions and not collect
        count = c.num_layers - last
        if self.is_initializing():  # their parameters are made, and nobody reads what the layers would compute
            count, last = 0, False
        x, outputs = run_layers(
            [functools.partial(layer, block=block) for block in blocks], params[:count], x, layer_inputs[:count],
            remat=c.remat, loop=c.loop_layers,
        )
        if last:
            def final(params, x, own):
                return layer(params, x, own, positions)

            x, _ = run_layers(final, params[count:], x, layer_inputs[count:], remat=c.remat)
        elif positions is not None:
            x = at_positions(x, positions)
        if c.final_norm:
            x = Norm(c.norm, c.norm_eps, c.dtype, name="final_norm")(x)
        return x, (outputs if collect or caches is not None else None)

    def _layer_params(self, x: jax.Array, inputs: LayerInputs) -> list[Any]:
        """The parameters of each layer, from the first on."""
        c = self.config
        if self.is_initializing():
            def init(key: jax.Array) -> Any:
                return Block(c, parent=None).init(key, x, inputs)["params"]

            self.param("layers", lambda key: {str(i): own for i, own in enumerate(init_layers(init, key, c.groups))})
        groups = self.variables["params"]["layers"]
        return [groups[str(c.group_of(i))] for i in range(c.num_layers)]


def at_positions(
    x: Float[Array, "batch length hidden"], positions: Int[Array, "batch few"]
) -> Float[Array, "batch few hidden"]:
    """The hidden states at some places of each row."""
    return jnp.take_along_axis(x, positions[..., None], axis=1)
