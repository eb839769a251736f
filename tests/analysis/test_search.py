"""`jaxlm plan --search`: which meshes are tried, and which is the fastest."""

from __future__ import annotations

import dataclasses
import json

import pytest

from jaxlm.analysis import compilation
from jaxlm.analysis import search as searching
from jaxlm.analysis.links import Prediction
from jaxlm.analysis.plan import Plan
from jaxlm.analysis.step import open_stand_in
from jaxlm.cli import main
from jaxlm.parallel.mesh import MeshConfig
from tests.analysis.test_plan import EXPERIMENT, PLAN, environment, needs_compiler  # noqa: F401 - a fixture


@pytest.mark.slow
@needs_compiler
def test_a_search_tries_meshes_and_names_the_fastest(capsys, tmp_path, monkeypatch):
    preset = tmp_path / "small.py"
    preset.write_text("from tests.analysis.test_plan import EXPERIMENT as experiment\n")
    monkeypatch.setattr(compilation, "prepare_environment", lambda: None)  # the fixture has done it, and undoes it
    assert main(["plan", str(preset), "--topology", "v5e:2x2", "--search", "--price", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [plan["mesh"] for plan in found["plans"]] == [
        {"data": 4, "fsdp": 1, "tensor": 1}, {"data": 1, "fsdp": 4, "tensor": 1}
    ]
    seconds = [plan["predicted_step_seconds"] for plan in found["plans"]]
    best = found["fastest"]
    assert best["predicted_step_seconds"] == min(seconds) and best["changes"]["mesh.fsdp"] == best["mesh"]["fsdp"]
    assert best["cost"] == pytest.approx(2 * 4 * best["steps"] * min(seconds) / 3600)


@needs_compiler
@pytest.mark.parametrize(("topology", "sizes"), [("2xv5e:4x8", [1, 4, 16, 32]), ("4xv5e:16x16", [1, 4, 16, 64, 256])])
def test_a_search_fills_at_most_one_slice_with_fsdp(topology, sizes, monkeypatch):
    monkeypatch.setattr(searching, "plan", lambda session, *_, **__: dataclasses.replace(
        PLAN, mesh=session.experiment.mesh
    ))
    tried = [found.mesh for found in searching.search(open_stand_in(EXPERIMENT), topology)]
    assert tried == [MeshConfig(data=-1, fsdp=size) for size in sizes]


@needs_compiler
def test_a_search_goes_on_with_tensor_while_links_bind_and_it_helps(monkeypatch):
    seconds, bounds = {1: 4.0, 2: 3.0, 4: 3.5}, {}

    def predict(found):
        tensor = found.changes["mesh.tensor"]
        return Prediction(seconds[tensor], 0.0, bounds.get(tensor, "links"))

    monkeypatch.setattr(searching, "plan", lambda *_, **__: PLAN)
    monkeypatch.setattr(Plan, "prediction", property(predict))
    for tensor, sizes in ((4, {1, 2, 4}), (2, {1, 2}), (1, {1})):
        bounds[tensor] = "compute"
        plans = list(searching.search(open_stand_in(EXPERIMENT), "v5e:4x4"))
        assert {found.changes["mesh.tensor"] for found in plans} == sizes
        assert searching.fastest(plans).changes["mesh.tensor"] == min(2, max(sizes))
