"""A model that a mesh shards is evaluated, scores and generates where its parameters are, as on one device."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxlm.inference.beam import search
from jaxlm.models.gpt2 import Gpt2
from jaxlm.objectives.causal_lm import CausalLM
from jaxlm.parallel.inference import constraints, place_batch, shard_params
from jaxlm.parallel.mesh import MeshConfig, make_mesh
from jaxlm.tokenizers.vocabulary import Vocabulary
from tests.tasks import support


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A masked model and a decoder, large enough that what is not sharded counts little, and labelled rows."""
    path, sizes = tmp_path_factory.mktemp("models"), dict(support.SIZES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(support, "SIZES", sizes | dict(hidden_size=64, num_layers=2, num_heads=4, intermediate_size=256))
        for name in ("bert", "gpt2"):
            support.pretrained(name, path)
    support.write_rows(path)
    return path


def start(folder: Path, run: Path, devices: int, **environment: str) -> subprocess.Popen:
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [sys.executable, "-m", "tests.parallel.inference_worker", str(folder), str(run)], text=True,
        env=os.environ | {"XLA_FLAGS": flags} | environment, cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )


def result(process: subprocess.Popen) -> dict:
    out, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors[-4000:]
    return json.loads(out.partition("RESULT")[2])


@pytest.fixture(scope="module")
def one(folder) -> dict:
    return result(start(folder, folder / "one", 1))


def test_beams_keep_the_cache_on_its_devices():
    """Parents are rows of the same prompt; the cache, the largest array of a search, is gathered nowhere."""
    here = "from tests.parallel.test_inference import print_gathered; print_gathered()"
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-c", here], env=os.environ | {"XLA_FLAGS": flags}, cwd=Path(__file__).parents[2],
        capture_output=True, text=True, timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    shapes = done.stdout.partition("GATHERED")[2].split()
    assert "16,288" in shapes, "the scores of three beams are, for top_k"
    assert not [shape for shape in shapes if shape.startswith("48,37")], shapes  # 16 prompts of 3 beams, 32 + 5 tokens


def print_gathered() -> None:
    """Print the shapes that a beam search of a decoder gathers on a mesh of eight devices."""
    model = Gpt2(num_layers=1, hidden_size=16, num_heads=2, intermediate_size=32, max_positions=64)
    objective = CausalLM(model=model).bind(Vocabulary.stand_in(96), 64)
    params = shard_params(objective.init(jax.random.key(0)), make_mesh(MeshConfig(1, 8, 1), jax.devices()))
    rows = place_batch((np.ones((16, 32), np.int32), np.ones((16, 32), bool)), params)
    with constraints(params):
        lowered = search.lower(objective, 5, 3, 0, params, rows, np.zeros(96, bool), np.float32(1))
    print("GATHERED", *re.findall(r"= \(?\w+\[([\d,]*)\][^=]* all-gather", lowered.compile().as_text()))


def check(found: dict, one: dict) -> None:
    """Answers are those of one device, and no device held more than its share of the parameters."""
    assert found["devices"] == 8 and one["devices"] == 1
    split = [shape for shape, part in found["shards"] if np.prod(part) * 8 == np.prod(shape)]
    assert all(shape in split for shape, _ in found["shards"] if len(shape) > 2), found["shards"]
    # 1/8 of a model and what is too small to be split. In training, with the optimizer's moments and copies that a save
    # is writing, six times that; a whole model beside it would be 1.8.
    held = {name: found[name] for name in ("trained", "evaluated", "answered")}
    assert held["trained"] < 1.4 and held["evaluated"] < 0.4 and held["answered"] < 0.4, held
    assert one["answered"] > 0.9 and one["evaluated"] > 0.9
    for name in ("vectors", "masks", "pseudo", "texts", "pairs", "scores"):
        np.testing.assert_allclose(np.array(found[name]), np.array(one[name]), atol=2e-4, err_msg=name)
    for name in ("greedy", "sampled", "beams"):
        assert found[name] == one[name], name


@pytest.mark.slow  # two processes, each of which compiles everything
def test_eight_devices_answer_as_one(folder, one):
    check(result(start(folder, folder / "eight", 8)), one)


@pytest.mark.slow  # three processes on two cores
def test_two_processes_answer_as_one(folder, one):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    both = [
        start(folder, folder / "two", 4, JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES="2", JAX_PROCESS_ID=str(i))
        for i in range(2)
    ]
    found = [result(process) for process in both]
    check(found[0], one)
    check(found[1] | {"scores": found[0]["scores"]}, one)
