"""GPT-2's training step on one device and on eight virtual ones: the same loss and the same new
parameters, with the vocabulary's matrix split and the loss cut into chunks."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest

from jaxlm.config.experiment import Experiment, TrainConfig
from jaxlm.models.gpt2 import Gpt2
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.parallel.mesh import MeshConfig, make_mesh
from jaxlm.parallel.rules import batch_sharding
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.training import program
from jaxlm.types import TokenBatch

MESHES = {"one": (1, 1, 1), "mixed": (2, 2, 2)}  # each alone: test_meshes.py, with BERT
LENGTH, ROWS = 24, 8


def run(shape: tuple[int, int, int]) -> dict:
    """Loss of a step and size of the new parameters on one mesh, as plain numbers."""
    model = Gpt2(hidden_size=16, num_layers=2, num_heads=4, intermediate_size=32, max_positions=LENGTH)
    objective = CausalLM(model=model, loss_chunk=6).bind(Vocabulary.stand_in(201), LENGTH)
    mesh = make_mesh(MeshConfig(*shape), jax.devices()[: int(np.prod(shape))])
    program.make_optimizer = lambda *_: optax.sgd(0.5)
    own = program.Program(Experiment(objective, train=TrainConfig(batch_size=ROWS)), objective, mesh)
    draw = np.random.default_rng(0)
    tokens = draw.integers(107, 201, (ROWS, LENGTH + 1))
    segments = 1 + np.cumsum(draw.random(tokens.shape) < 0.15, axis=1)
    batch = TokenBatch(*(jax.device_put(x.astype(np.int32), batch_sharding(mesh)) for x in (tokens, segments)))
    state = own.init(0)
    query = state.params["decoder"]["layers"]["1"]["attention"]["query"]["kernel"]
    split = [list(query.shape), list(query.addressable_shards[0].data.shape)]
    state, terms = own.train_step(state, batch, ())
    return {
        "loss": float(terms["loss"].total), "targets": float(terms["lm_loss"].weight), "split": split,
        "params": [float(abs(p).sum()) for p in jax.tree.leaves(state.params)],
    }


@pytest.fixture(scope="module")
def results() -> dict:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    command = [sys.executable, "-m", "tests.objectives.test_causal_lm_meshes"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_the_same_where_everything_is_split(results):
    one, many = results["one"], results["mixed"]
    assert many["loss"] == pytest.approx(one["loss"], abs=1e-5)
    assert many["targets"] == one["targets"] > 100
    assert many["params"] == pytest.approx(one["params"], rel=1e-4, abs=1e-5)


def test_parameters_are_really_split(results):
    assert results["one"]["split"] == [[16, 16], [16, 16]]
    assert results["mixed"]["split"] == [[16, 16], [8, 8]]


if __name__ == "__main__":
    print(json.dumps({name: run(shape) for name, shape in MESHES.items()}))
