"""LSTM with a projection (Sak et al. 2014) and clipped states, as in ELMo."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlm.models.layers.dense import add_bias, dense_product
from jaxlm.types import Params


class LstmState(NamedTuple):
    """Recurrent state of one layer."""

    cell: Float[Array, "batch cells"]
    hidden: Float[Array, "batch hidden"]


def init_lstm(key: jax.Array, inputs: int, cells: int, hidden: int) -> Params:
    """Return fresh parameters, float32: `kernel`, `bias` and `projection/kernel`.

    `kernel` is [inputs + hidden, 4 · cells]: input gate, candidate, forget gate, output gate.
    """
    key_kernel, key_projection = jax.random.split(key)
    glorot = nn.initializers.glorot_uniform()
    return {
        "kernel": glorot(key_kernel, (inputs + hidden, 4 * cells), jnp.float32),
        "bias": jnp.zeros(4 * cells, jnp.float32),
        "projection": {"kernel": glorot(key_projection, (cells, hidden), jnp.float32)},
    }


def run_lstm(
    params: Params, x: Float[Array, "batch length inputs"], state: LstmState, clip: float
) -> tuple[Float[Array, "batch length hidden"], LstmState]:
    """Run one LSTM over a sequence.

    1 is added to the bias of the forget gate. `clip` limits the absolute values of cells (before the output gate) and
    of projected states; 0 for no limit.

    Returns:
        The hidden states after each token, and the state after the last token.
    """
    kernel, width = params["kernel"].astype(x.dtype), x.shape[-1]
    projection = params["projection"]["kernel"].astype(x.dtype)
    # The inputs' part of the gates is one product for all tokens.
    gates = add_bias(dense_product(x, kernel[:width]), params["bias"])
    hidden, state = _recurrence(kernel[width:], projection, gates.swapaxes(0, 1), state, clip)
    return hidden.swapaxes(0, 1), state


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _recurrence(
    kernel: Float[Array, "hidden gates"], projection: Float[Array, "cells hidden"],
    gates: Float[Array, "length batch gates"], state: LstmState, clip: float,
) -> tuple[Float[Array, "length batch hidden"], LstmState]:
    """Return the hidden states and the last state; the gradient of each kernel is one product over all tokens.

    jax would add up a gradient a token, and round each sum to the type of the kernel.
    """
    return _forward(kernel, projection, gates, state, clip)[0]


def _scan(
    kernel: jax.Array, projection: jax.Array, gates: jax.Array, shifts: jax.Array, state: LstmState, clip: float
) -> tuple[tuple[jax.Array, LstmState], jax.Array]:
    """Return the results of `_recurrence`, and what was projected; `shifts` are added to its projection."""

    def clipped(value: jax.Array) -> jax.Array:
        return jnp.clip(value, -clip, clip) if clip else value

    def step(state: LstmState, inputs: tuple[jax.Array, jax.Array]) -> tuple[LstmState, tuple[jax.Array, jax.Array]]:
        gates, shift = inputs
        gates = (gates + state.hidden @ kernel).astype(jnp.float32)
        into, candidate, forget, out = jnp.split(gates, 4, axis=-1)
        cell = clipped(jax.nn.sigmoid(forget + 1.0) * state.cell + jax.nn.sigmoid(into) * jnp.tanh(candidate))
        output = (jax.nn.sigmoid(out) * jnp.tanh(cell)).astype(projection.dtype)
        hidden = clipped(output @ projection + shift)
        return LstmState(cell, hidden), (hidden, output)

    state, (hidden, outputs) = jax.lax.scan(step, state, (gates, shifts))
    return (hidden, state), outputs


def _forward(
    kernel: jax.Array, projection: jax.Array, gates: jax.Array, state: LstmState, clip: float
) -> tuple[tuple[jax.Array, LstmState], tuple[Any, jax.Array, jax.Array]]:
    scan = functools.partial(_scan, kernel, projection, clip=clip)
    shifts = jnp.zeros((len(gates), *state.hidden.shape), gates.dtype)
    results, backward, outputs = jax.vjp(scan, gates, shifts, state, has_aux=True)
    return results, (backward, jnp.concatenate([state.hidden[None], results[0][:-1]]), outputs)


def _backward(
    _: float, saved: tuple[Any, jax.Array, jax.Array], gradient: tuple[jax.Array, LstmState]
) -> tuple[jax.Array, jax.Array, jax.Array, LstmState]:
    backward, before, outputs = saved
    d_gates, d_projected, d_state = backward(gradient)
    tokens = (((0, 1), (0, 1)), ((), ()))
    d_kernel = jax.lax.dot_general(before, d_gates, tokens)
    return d_kernel, jax.lax.dot_general(outputs, d_projected, tokens), d_gates, d_state


_recurrence.defvjp(_forward, _backward)
