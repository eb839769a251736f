"""Memory: what a model carries from a batch of a stream to the next."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlm.config.experiment import OptimizerConfig, TrainConfig
from jaxlm.models.base import Model
from jaxlm.objectives.base import Objective, Term
from jaxlm.parallel.mesh import MeshConfig, make_mesh
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.training import program as module
from jaxlm.training.checkpoints import Checkpoints
from jaxlm.training.loop import evaluate
from jaxlm.training.program import Program
from jaxlm.types import TokenBatch

ROWS, LENGTH = 8, 5


@dataclasses.dataclass(frozen=True)
class RunningMean(Objective):
    """Predicts each row's sum from an exponential mean of the sums before it."""

    model = Model()

    def init(self, key):
        return {"dense": {"kernel": jnp.full((1, 1), 0.5)}}

    def corrupt(self, key, batch):
        return {"sums": jnp.sum(batch.tokens, axis=1, keepdims=True).astype(jnp.float32)}

    def initial_memory(self, rows):
        return {"mean": jnp.zeros((rows, 1))}

    def stream_loss(self, params, example, memory, key, train):
        error = example["sums"] - memory["mean"] @ params["dense"]["kernel"]
        terms = {"error": Term.of(error**2, jnp.ones_like(error), 1.0)}
        return terms, {"mean": 0.75 * memory["mean"] + 0.25 * example["sums"]}

    def real_tokens(self, example, batch):
        return batch.segment_ids > 0


class PairedMean(RunningMean):
    """Predicts the second row of a pair from the first one's mean."""

    row_group = 2

    def stream_loss(self, params, example, memory, key, train):
        error = example["sums"][1::2] - memory["mean"][::2] @ params["dense"]["kernel"]
        _, memory = super().stream_loss(params, example, memory, key, train)
        return {"error": Term.of(error**2, jnp.ones_like(error), 1.0)}, memory


def program(monkeypatch, num_microbatches: int, objective: Objective = RunningMean(), **options) -> Program:
    monkeypatch.setattr(module, "make_optimizer", lambda *_: optax.sgd(1e-3))
    train = TrainConfig(steps=10, batch_size=ROWS, accumulate=num_microbatches, **options)
    mesh = make_mesh(MeshConfig(1), jax.devices()[:1])
    return Program(objective.bind_unchecked(Vocabulary.stand_in(160)), train, OptimizerConfig(), mesh)


def batch(step: int) -> TokenBatch:
    tokens = np.random.default_rng(step).integers(0, 9, (ROWS, LENGTH)).astype(np.int32)
    return TokenBatch(tokens, np.ones_like(tokens))


def by_hand(steps: int) -> tuple[float, np.ndarray]:
    """(kernel, memory) after the steps, in NumPy."""
    kernel, mean = 0.5, np.zeros((ROWS, 1))
    for step in range(steps):
        sums = batch(step).tokens.sum(axis=1, keepdims=True)
        kernel -= 1e-3 * np.mean(-2 * (sums - mean * kernel) * mean)
        mean = 0.75 * mean + 0.25 * sums
    return kernel, mean


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_each_row_finds_what_it_left(num_microbatches, monkeypatch):
    own = program(monkeypatch, num_microbatches)
    state = own.init_state(own.init_params(0))
    for step in range(3):
        state, _ = own.train_step(state, batch(step), ())
    kernel, mean = by_hand(3)
    np.testing.assert_allclose(state.memory["mean"], mean, rtol=1e-6)
    np.testing.assert_allclose(state.params["dense"]["kernel"], [[kernel]], rtol=1e-5)


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_rows_of_a_group_stay_together(num_microbatches, monkeypatch):
    own = program(monkeypatch, num_microbatches, PairedMean())
    state, kernel, mean = own.init_state(own.init_params(0)), 0.5, np.zeros((ROWS, 1))
    for step in range(3):
        state, _ = own.train_step(state, batch(step), ())
        sums = batch(step).tokens.sum(axis=1, keepdims=True)
        kernel -= 1e-3 * np.mean(-2 * (sums[1::2] - mean[::2] * kernel) * mean[::2])
        mean = 0.75 * mean + 0.25 * sums
    np.testing.assert_allclose(state.memory["mean"], mean, rtol=1e-6)
    np.testing.assert_allclose(state.params["dense"]["kernel"], [[kernel]], rtol=1e-5)


@pytest.mark.parametrize(("broken", "expected"), [("params", 1), ("memory", 0)])
def test_a_skipped_step_moves_it_on_with_the_text(broken, expected, monkeypatch):
    """The memory is that of the batch that was read, or the initial one where it is not finite."""
    own = program(monkeypatch, 1, skip_nonfinite=1)
    fresh = own.init_state(own.init_params(0))
    state = jax.tree.map(jnp.copy, fresh)
    state = state._replace(**{broken: jax.tree.map(lambda x: x * jnp.nan, getattr(state, broken))})
    state, terms = own.train_step(state, batch(0), ())
    assert not np.isfinite(terms["loss"].total)
    np.testing.assert_allclose(state.memory["mean"], by_hand(expected)[1], rtol=1e-6)
    if broken == "memory":
        np.testing.assert_array_equal(state.params["dense"]["kernel"], fresh.params["dense"]["kernel"])


def test_a_checkpoint_has_it(monkeypatch, tmp_path):
    own = program(monkeypatch, 1)
    state, _ = own.train_step(own.init_state(own.init_params(0)), batch(0), ())
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state, 1, {})
    checkpoints.wait()
    restored, _ = checkpoints.restore(own.shapes, own.shardings, print)
    checkpoints.close()
    np.testing.assert_array_equal(restored.memory["mean"], by_hand(1)[1])


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_an_evaluation_begins_with_none(num_microbatches, monkeypatch):
    """The memory of training is neither seen nor changed."""
    own = program(monkeypatch, num_microbatches)
    state, _ = own.train_step(own.init_state(own.init_params(0)), batch(0), ())

    class Feed:
        def __init__(self):
            self.held_out_shares = {"": 1.0}

        def held_out(self, objective, source):
            return iter([batch(5), batch(6)])

    found = evaluate(own, state, Feed())
    kernel, mean, errors = by_hand(1)[0], np.zeros((ROWS, 1)), []
    for step in (5, 6):
        sums = batch(step).tokens.sum(axis=1, keepdims=True)
        errors.append((sums - mean * kernel) ** 2)
        mean = 0.75 * mean + 0.25 * sums
    np.testing.assert_allclose(found["error"], np.mean(errors), rtol=1e-5)
