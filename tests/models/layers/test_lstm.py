"""The LSTM with a projection against PyTorch's, and its clipping against the formulas."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxlm.models.layers.lstm import LstmState, _recurrence, _scan, init_lstm, run_lstm

INPUTS, CELLS, HIDDEN, ROWS, LENGTH = 5, 7, 4, 3, 6


def example(scale: float = 1.0):
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: (scale * rng.normal(size=leaf.shape)).astype(np.float32),
        jax.eval_shape(lambda: init_lstm(jax.random.key(0), INPUTS, CELLS, HIDDEN)),
    )
    state = LstmState(*(rng.normal(size=(ROWS, size)).astype(np.float32) for size in (CELLS, HIDDEN)))
    return params, rng.normal(size=(ROWS, LENGTH, INPUTS)).astype(np.float32), state


def torch_lstm(params) -> torch.nn.LSTM:
    """Return PyTorch's LSTM, with gates in the order input, forget, candidate, output and our forget bias added."""
    lstm = torch.nn.LSTM(INPUTS, CELLS, proj_size=HIDDEN, batch_first=True)

    def ordered(x):
        into, candidate, forget, out = np.split(x, 4, axis=-1)
        return torch.tensor(np.concatenate([into, forget, candidate, out], axis=-1).T)

    bias = params["bias"] + np.repeat([0.0, 0.0, 1.0, 0.0], CELLS).astype(np.float32)
    state = {
        "weight_ih_l0": ordered(params["kernel"][:INPUTS]), "weight_hh_l0": ordered(params["kernel"][INPUTS:]),
        "bias_ih_l0": ordered(bias), "bias_hh_l0": torch.zeros(4 * CELLS),
        "weight_hr_l0": torch.tensor(params["projection"]["kernel"].T),
    }
    lstm.load_state_dict(state)
    return lstm


def test_it_equals_pytorchs_lstm_with_projection():
    """Equal states, outputs and gradients."""
    params, x, state = example()
    lstm = torch_lstm(params)
    hidden, cell = (torch.tensor(part)[None] for part in (state.hidden, state.cell))
    fed = torch.tensor(x, requires_grad=True)
    expected, (last_hidden, last_cell) = lstm(fed, (hidden, cell))
    expected.square().sum().backward()

    def total(params, x):
        y, after = run_lstm(params, x, state, 0.0)
        return jnp.sum(y**2), (y, after)

    gradients, (y, after) = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(params, x)
    np.testing.assert_allclose(y, expected.detach(), atol=1e-5)
    np.testing.assert_allclose(after.hidden, last_hidden[0].detach(), atol=1e-5)
    np.testing.assert_allclose(after.cell, last_cell[0].detach(), atol=1e-5)
    np.testing.assert_allclose(gradients[1], fed.grad, atol=1e-4)
    np.testing.assert_allclose(gradients[0]["projection"]["kernel"], lstm.weight_hr_l0.grad.T, atol=1e-4)


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_gradients_are_those_of_the_scan(clip):
    params, x, state = example()
    kernel, projection = params["kernel"][INPUTS:], params["projection"]["kernel"]
    gates = x.swapaxes(0, 1) @ params["kernel"][:INPUTS] + params["bias"]

    def total(run, *arguments):
        (hidden, after), weights = run(*arguments), jnp.linspace(-1.0, 1.0, ROWS * LENGTH * HIDDEN)
        return jnp.sum(hidden.ravel() * weights) + jnp.sum(after.cell) + jnp.sum(after.hidden**2)

    def scanned(kernel, projection, gates, state):
        return _scan(kernel, projection, gates, jnp.zeros((LENGTH, ROWS, HIDDEN)), state, clip)[0]

    found, expected = (
        jax.jit(jax.grad(functools.partial(total, run), argnums=(0, 1, 2, 3)))(kernel, projection, gates, state)
        for run in (lambda *arguments: _recurrence(*arguments, clip), scanned)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)


def test_cells_and_projected_states_are_clipped():
    params, x, state = example(scale=3.0)
    y, after = jax.jit(run_lstm, static_argnums=3)(params, x, state, 0.5)
    cell, hidden, expected = state.cell.astype(float), state.hidden.astype(float), []

    def sigmoid(value):
        return 1 / (1 + np.exp(-value))

    for place in range(LENGTH):
        gates = np.concatenate([x[:, place], hidden], axis=1) @ params["kernel"] + params["bias"]
        into, candidate, forget, out = np.split(gates, 4, axis=1)
        cell = np.clip(sigmoid(forget + 1) * cell + sigmoid(into) * np.tanh(candidate), -0.5, 0.5)
        hidden = np.clip((sigmoid(out) * np.tanh(cell)) @ params["projection"]["kernel"], -0.5, 0.5)
        expected.append(hidden)
    assert (np.abs(cell) == 0.5).any() and (np.abs(hidden) == 0.5).any() and (np.abs(hidden) < 0.5).any()
    np.testing.assert_allclose(y, np.stack(expected, axis=1), atol=1e-5)
    np.testing.assert_allclose(after.cell, cell, atol=1e-5)
