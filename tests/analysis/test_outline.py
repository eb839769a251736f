"""Outlines of meshes: the collectives of a step by hand, and which meshes seem to fit."""

import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from jaxlm.analysis import compilation
from jaxlm.analysis.outline import collective_seconds, outlines
from jaxlm.analysis.step import open_stand_in
from tests.analysis.test_plan import EXPERIMENT, needs_compiler


def mesh(data: int, fsdp: int, tensor: int, slices: int = 1) -> SimpleNamespace:
    """Mesh of v5e chips whose slices are rows of 4 chips each."""
    places = itertools.product(range(slices), range(data * fsdp * tensor // slices // 4), range(4))
    chips = [SimpleNamespace(platform="tpu", device_kind="TPU v5 lite", slice_index=s, coords=(x, y, 0))
             for s, x, y in places]
    return SimpleNamespace(devices=np.array(chips).reshape(data, fsdp, tensor))


@pytest.mark.parametrize(("shape", "slices", "expected"), [
    # A billion parameters are 2 GB in bfloat16. Four chips in a line have 50 GB/s.
    ((1, 4, 1), 1, 3 * 2 * 3 * 2e9 * 3 / 4 / 50e9),  # three microbatches, each two gathers and a reduction
    ((4, 1, 1), 1, 2 * 2e9 * 3 / 4 / 50e9),
    ((1, 1, 4), 1, 2 * 1e9 * 3 / 4 / 50e9),  # a gigabyte of activations
    ((2, 4, 1), 2, 3 * 2 * 3 * 2e9 * 3 / 4 / 50e9 + 0.5e9 / 3.125e9),  # a quarter of the gradients between slices
])
def test_collectives_of_a_step(shape, slices, expected):
    found = collective_seconds(mesh(*shape, slices=slices), 10**9, 6 if shape[1] > 1 else 1, 1e9)
    assert sum(found) == pytest.approx(expected)


@needs_compiler
def test_what_does_not_fit_is_sharded_or_divided_into_microbatches(monkeypatch):
    for name, value in compilation.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    assert {one.mesh.fsdp for one in outlines(open_stand_in(EXPERIMENT), "v5e:2x2")} == {1, 2, 4}
    wide = dataclasses.replace(EXPERIMENT.objective.model, hidden_size=8192, intermediate_size=32768, num_layers=4)
    large = open_stand_in(dataclasses.replace(
        EXPERIMENT, objective=dataclasses.replace(EXPERIMENT.objective, model=wide),
        train=dataclasses.replace(EXPERIMENT.train, batch_size=8192),
    ))
    best = outlines(large, "v5e:4x4")  # 3.2 billion parameters with AdamW's moments: 39 GB
    assert best and all(one.mesh.fsdp * one.mesh.tensor >= 4 for one in best)
    assert all(one.accumulate > 1 for one in best)  # 512 rows of 32 a chip: 18 GB of activations
