"""T5's corruption and loss on one device and on eight virtual ones: the same tokens, the same loss."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxlm.models.t5 import T5
from jaxlm.objectives.base import total_loss
from jaxlm.objectives.span_corruption import SpanCorruption
from jaxlm.parallel.activations import use_mesh
from jaxlm.parallel.mesh import MeshConfig, make_mesh
from jaxlm.parallel.rules import batch_sharding, shardings
from jaxlm.tokenizers.vocabulary import Vocabulary
from jaxlm.types import TokenBatch

MESHES = {"one": (1, 1, 1), "data": (8, 1, 1), "2x4": (2, 4, 1), "mixed": (2, 2, 2)}
LENGTH, ROWS = 40, 8


def run(shape: tuple[int, int, int]) -> dict:
    """Corrupted rows and, on one device and where everything is split, the loss and the size of its gradient."""
    model = T5(hidden_size=16, num_layers=2, num_heads=4, head_dim=4, intermediate_size=32,
                     activation="gated-gelu", tied_head=False, scaled_head=False)
    objective = SpanCorruption(model=model).bind(Vocabulary.stand_in(200), LENGTH)
    mesh = make_mesh(MeshConfig(*shape), jax.devices()[: int(np.prod(shape))])
    raw = objective.raw_length(LENGTH)
    draw = np.random.default_rng(0)
    real = np.arange(raw) < draw.integers(0, raw + 1, ROWS)[:, None]
    tokens = np.where(real, draw.integers(107, 200, (ROWS, raw)), 0)
    batch = TokenBatch(*(jax.device_put(x.astype(np.int32), batch_sharding(mesh)) for x in (tokens, real)))

    @jax.jit
    def corrupt(batch):
        return objective.corrupt(jax.random.key(1, impl="threefry2x32"), batch)

    example = corrupt(batch)
    rows = {name: np.asarray(x).tolist() for name, x in example.items()}
    if shape not in (MESHES["one"], MESHES["mixed"]):
        return {"example": rows}
    layout = shardings(jax.eval_shape(objective.init, jax.random.key(0)), mesh)
    params = jax.jit(objective.init, out_shardings=layout)(jax.random.key(0))

    @jax.jit
    def step(params, example):
        def of_params(params):
            return total_loss(objective.loss(params, example, jax.random.key(2), False))

        with use_mesh(mesh):  # as a train step does
            loss, grads = jax.value_and_grad(of_params)(params)
        return loss, sum(abs(g).sum() for g in jax.tree.leaves(grads))

    loss, size = step(params, example)
    query = params["encoder"]["layers"]["1"]["attention"]["query"]["kernel"]
    return {
        "example": rows, "loss": float(loss), "gradients": float(size),
        "query": [list(query.shape), list(query.addressable_shards[0].data.shape)],
    }


@pytest.fixture(scope="module")
def results() -> dict:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    command = [sys.executable, "-m", "tests.objectives.test_span_corruption_meshes"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("mesh", ["data", "2x4", "mixed"])
def test_the_same_corruption_on_every_mesh(results, mesh):
    one = results["one"]["example"]
    assert results[mesh]["example"] == one
    assert sum(map(sum, one["weights"])) > 20


def test_the_same_loss_where_everything_is_split(results):
    one, many = results["one"], results["mixed"]
    assert many["loss"] == pytest.approx(one["loss"], abs=1e-5)
    assert many["gradients"] == pytest.approx(one["gradients"], rel=1e-4)


def test_parameters_are_really_split(results):
    assert results["mixed"]["query"] == [[16, 16], [8, 8]]
    assert results["one"]["query"] == [[16, 16], [16, 16]]


if __name__ == "__main__":
    print(json.dumps({name: run(shape) for name, shape in MESHES.items()}))
