"""LSTM with a projection (Sak et al. 2014) and clipped states, as in ELMo."""

from __future__ import annotations

from typing import NamedTuple

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

    def clipped(value: jax.Array) -> jax.Array:
        return jnp.clip(value, -clip, clip) if clip else value

    def step(state: LstmState, gates: jax.Array) -> tuple[LstmState, jax.Array]:
        gates = (gates + state.hidden @ kernel[width:]).astype(jnp.float32)
        into, candidate, forget, out = jnp.split(gates, 4, axis=-1)
        cell = clipped(jax.nn.sigmoid(forget + 1.0) * state.cell + jax.nn.sigmoid(into) * jnp.tanh(candidate))
        hidden = clipped((jax.nn.sigmoid(out) * jnp.tanh(cell)).astype(x.dtype) @ projection)
        return LstmState(cell, hidden), hidden

    state, hidden = jax.lax.scan(step, state, gates.swapaxes(0, 1))
    return hidden.swapaxes(0, 1), state
