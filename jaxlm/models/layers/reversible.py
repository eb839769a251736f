"""Reversible layers, whose backward pass computes their inputs from their outputs (Gomez et al. 2017)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxlm.models.layers.stack import run_layers
from jaxlm.parallel.activations import constrain


class Coupling(NamedTuple):
    """Reversible layer (Gomez et al. 2017): y1 = x1 + first(x2), y2 = x2 + second(y1)."""

    first: Callable[[Any, jax.Array, Any, Any, Any], tuple[jax.Array, Any]]
    """(params, x2, layer inputs, shared inputs, residuals) -> (change, residuals).

    The residuals are None in the forward pass. The backward pass gets those of the forward pass, because a recomputed
    x2 is rounded differently and could change discrete choices, such as the bucket of a vector.
    """
    second: Callable[[Any, jax.Array, Any, Any], jax.Array]
    """(params, y1, layer inputs, shared inputs) -> change."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def run_reversible(
    layers: tuple[Coupling, ...], repeats: int, loop: bool, params: tuple[Any, ...],
    state: tuple[jax.Array, jax.Array], per_layer: tuple[Any, ...], shared: Any,
) -> tuple[jax.Array, jax.Array]:
    """Run a sequence of couplings `repeats` times over two streams.

    The backward pass computes each layer's inputs from its outputs, so that memory does not grow with depth, except for
    the residuals of `Coupling.first` (Kitaev et al. 2020, section 3).

    Args:
        layers: The couplings.
        repeats: Number of repeats.
        loop: As in `run_layers`.
        params: For each coupling, the stacked parameters of its repeats.
        state: The two streams.
        per_layer: For each coupling, the stacked inputs of its repeats. They have no gradients.
        shared: Inputs of all layers. They have no gradients.
    """
    return reversible_forward(layers, repeats, loop, params, state, per_layer, shared)[0]


def reversible_forward(layers, repeats, loop, params, state, per_layer, shared):
    """Return the streams after the layers, and the residuals of the backward pass."""
    def forward(params, state, per_layer):
        residuals = []
        for layer, layer_params, layer_inputs in zip(layers, params, per_layer, strict=True):
            x1, x2 = state
            change, residual = layer.first(layer_params, x2, layer_inputs, shared, None)
            y1 = constrain(x1 + change)
            state = y1, constrain(x2 + layer.second(layer_params, y1, layer_inputs, shared))
            residuals.append(residual)
        return state, tuple(residuals)

    state, residuals = run_layers(forward, params, state, per_layer, num_layers=repeats, loop=loop)
    return state, (params, state, per_layer, shared, residuals)


def _reversible_backward(layers, repeats, loop, saved, gradient):
    params, state, per_layer, shared, residuals = saved

    def backward_layer(layer, params, carry, layer_inputs, residuals):
        (y1, y2), (dy1, dy2) = carry
        change, vjp = jax.vjp(lambda params, y: layer.second(params, y, layer_inputs, shared), params, y1)
        d_second, dy = vjp(dy2)
        x2, dy1 = constrain(y2 - change), dy1 + dy
        change, vjp = jax.vjp(lambda params, x: layer.first(params, x, layer_inputs, shared, residuals)[0], params, x2)
        d_first, dx = vjp(dy1)
        carry = (constrain(y1 - change), x2), (dy1, dy2 + dx)
        # The barrier runs one layer after the other; otherwise all layers' inputs would be held for their gradients.
        return jax.lax.optimization_barrier((carry, jax.tree.map(jnp.add, d_first, d_second)))

    def backward(params, carry, xs):
        gradients = []
        for layer, layer_params, *layer_xs in reversed(list(zip(layers, params, *xs, strict=True))):
            carry, d_params = backward_layer(layer, layer_params, carry, *layer_xs)
            gradients.insert(0, d_params)
        return carry, tuple(gradients)

    flip = functools.partial(jax.tree.map, lambda leaf: jnp.flip(leaf, 0))
    (_, gradient), d_params = run_layers(
        backward, flip(params), (state, gradient), flip((per_layer, residuals)), num_layers=repeats, loop=loop
    )
    return flip(d_params), gradient, None, None


run_reversible.defvjp(reversible_forward, _reversible_backward)
