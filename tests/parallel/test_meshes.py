"""One device or eight, split in whatever way: the same masks, also of dropout, the same losses, and really split."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.training.support import write_preset


def worker(folder: Path, *trained: str) -> dict:
    """What tests/parallel/worker.py found on eight virtual devices."""
    preset = write_preset(folder)
    done = subprocess.run(
        [sys.executable, "-m", "tests.parallel.worker", str(preset), str(folder), *trained],
        env=os.environ | {"XLA_FLAGS": os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=8"},
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["devices"] == 8
    return result


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    return worker(tmp_path_factory.mktemp("eight"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return worker(tmp_path_factory.mktemp("trained"), "data", "fsdp", "tensor", "mixed")


@pytest.mark.slow  # other masks would give the run that moves, below, other losses
@pytest.mark.parametrize("mesh", ["data", "2x4", "mixed"])
def test_the_same_masks_bit_for_bit(trained, mesh):
    examples = trained["meshes"]["one"]["examples"]
    assert len(set(examples)) == len(examples), "each step has its own"
    assert trained["meshes"][mesh]["examples"] == examples


@pytest.mark.slow
def test_the_same_start(trained):
    assert trained["same_start"]


def test_the_same_batches_also_where_short_rows_come_first(eight):
    assert eight["fed"]["mixed"]["digests"] == eight["fed"]["one"]["digests"]
    assert len(set(eight["fed"]["one"]["digests"])) == 4
    assert eight["fed"]["mixed"]["parts"] == [[[16, 14], [4, 14]]] * 2 + [[[8, 30], [2, 30]]] * 2


@pytest.mark.slow  # a run that moves between meshes, below, has one after the other
@pytest.mark.parametrize("mesh", ["data", "fsdp", "tensor", "mixed"])
def test_the_same_losses(trained, mesh):
    one = trained["meshes"]["one"]["losses"]
    assert one[-1] != one[0]
    np.testing.assert_allclose(trained["meshes"][mesh]["losses"], one, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp", "mixed"])
def test_a_replayed_step_has_the_same_bits(trained, mesh):
    assert trained["meshes"][mesh]["replayed"] == 0


# Sizes: width 32, feed-forward 64, 1 layer, vocabulary 162.


def parts(eight, mesh: str, name: str) -> list[list[int]]:
    """Whole shape and shape of a part, of the one parameter, and of the two moments, whose paths end in `name`."""
    found = [shape for path, shape in eight["meshes"][mesh]["shards"].items() if path.endswith(name)]
    assert len(found) == 3, (name, sorted(eight["meshes"][mesh]["shards"]))
    assert found[0] == found[1] == found[2], "parameter, first and second moment are sharded alike"
    return found[0]


@pytest.mark.parametrize(
    ("mesh", "kernel", "word"),
    [
        ("data", [32, 64], [162, 32]),
        ("fsdp", [4, 64], [162, 4]),
        ("tensor", [32, 8], [162, 32]),  # 162 is not divisible by 8: that dimension stays whole
        ("2x4", [8, 64], [162, 8]),
        ("mixed", [16, 32], [81, 16]),
        ("own", [4, 64], [162, 32]),  # tensor, with a rule of the model's own
    ],
)
def test_parameters_and_moments_are_split(eight, mesh, kernel, word):
    assert parts(eight, mesh, "layers/mlp/wi/kernel") == [[1, 32, 64], [1, *kernel]]
    assert parts(eight, mesh, "word/embedding") == [[162, 32], word]


def test_most_of_the_state_is_split(eight):
    for mesh in ("fsdp", "mixed"):
        whole = held = 0
        for shape, part in eight["meshes"][mesh]["shards"].values():
            whole, held = whole + np.prod(shape), held + np.prod(part)
        assert held < whole * (0.2 if mesh == "fsdp" else 0.4)


def test_a_run_goes_on_on_another_mesh(eight):
    losses = eight["resumed"]["losses"]
    assert [step for step, _ in losses["moved"]] == list(range(1, 10))
    np.testing.assert_allclose(losses["moved"], losses["alone"], atol=1e-4)
    np.testing.assert_array_equal(losses["moved"][:5], losses["alone"][:5])
    assert eight["resumed"]["batches"] == [1] * 9, "each step had the same batch each time"
