"""Compiled steps of the main presets beside those of golden files, so that nothing grows unnoticed.

    python -m tests.analysis.test_golden [PRESET …]     # writes golden/PRESET.json, by default all; commit the reason

The step has two layers and 16 rows, on v5e:2x2 with `data` 2 and `fsdp` 2, of one version of jax and libtpu.
"""

import dataclasses
import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxlm.analysis import compilation
from jaxlm.analysis.extrapolate import stack_depths
from jaxlm.analysis.plan import plan
from jaxlm.analysis.step import open_stand_in
from jaxlm.config.presets import load_preset
from jaxlm.parallel.mesh import MeshConfig

FOLDER = Path(__file__).parent / "golden"
PRESETS = sorted(file.stem for file in FOLDER.glob("*.json"))
FIGURES = ("flops_per_step", "executed_flops_per_chip", "bytes_accessed_per_chip", "hbm_bytes_per_chip")
MARGIN = 0.02


def versions() -> dict[str, str]:
    return {"jax": jax.__version__, "libtpu": importlib.metadata.version("libtpu")}


def compiled(preset: str) -> dict[str, Any]:
    """Return the figures of a golden file."""
    experiment = load_preset(f"configs/{preset}.py")
    model = experiment.objective.model
    layers = dict.fromkeys(stack_depths(model), 2)
    experiment = dataclasses.replace(
        experiment, mesh=MeshConfig(data=2, fsdp=2), train=dataclasses.replace(experiment.train, batch_size=16),
        objective=dataclasses.replace(experiment.objective, model=dataclasses.replace(model, **layers)),
    )
    found = plan(open_stand_in(experiment), "v5e:2x2").to_json()
    moved = {kind: {name: item[name] for name in ("count", "bytes")} for kind, item in found["collectives"].items()}
    return versions() | {name: found[name] for name in FIGURES} | {"collectives": moved}


def differences(golden: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return what has changed: any count of collectives, and figures by more than the margin."""
    found = [
        f"{name}: {golden[name]:,} → {now[name]:,}" for name in FIGURES
        if abs(now[name] - golden[name]) > MARGIN * golden[name]
    ]
    none = {"count": 0, "bytes": 0}
    for kind in sorted(golden["collectives"] | now["collectives"]):
        before, after = (one["collectives"].get(kind, none) for one in (golden, now))
        if before["count"] != after["count"] or abs(after["bytes"] - before["bytes"]) > MARGIN * before["bytes"]:
            counts = f"{before['count']} of {before['bytes']:,} bytes → {after['count']} of {after['bytes']:,}"
            found.append(f"{kind}: {counts}")
    return found


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
@pytest.mark.parametrize("preset", PRESETS)
def test_the_compiled_step_is_that_of_the_golden_file(preset, monkeypatch):
    golden = json.loads((FOLDER / f"{preset}.json").read_text())
    if (made_with := {name: golden[name] for name in versions()}) != versions():
        pytest.skip(f"the golden file is of {made_with}")
    for name, value in compilation.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    changed = differences(golden, compiled(preset))
    assert not changed, f"{changed}; if it is meant, `python -m tests.analysis.test_golden {preset}`"


def test_one_more_collective_or_three_per_cent_of_memory_is_a_difference():
    golden = dict.fromkeys(FIGURES, 1000) | {"collectives": {"all-gather": {"count": 3, "bytes": 300}}}
    assert differences(golden, golden | {"flops_per_step": 1019, "hbm_bytes_per_chip": 981}) == []
    assert differences(golden, golden | {"hbm_bytes_per_chip": 1030}) == ["hbm_bytes_per_chip: 1,000 → 1,030"]
    more = {"all-gather": {"count": 4, "bytes": 300}, "all-to-all": {"count": 1, "bytes": 8}}
    assert differences(golden, golden | {"collectives": more}) == [
        "all-gather: 3 of 300 bytes → 4 of 300", "all-to-all: 0 of 0 bytes → 1 of 8"
    ]
    assert len(differences(golden, golden | {"collectives": {}})) == 1


@pytest.mark.parametrize("preset", PRESETS)
def test_every_golden_file_has_its_figures(preset):
    golden = json.loads((FOLDER / f"{preset}.json").read_text())
    assert set(golden) == {"jax", "libtpu", *FIGURES, "collectives"} and golden["collectives"]


def main() -> None:
    compilation.prepare_environment()
    for preset in sys.argv[1:] or PRESETS:
        text = json.dumps(compiled(preset), indent=1)
        (FOLDER / f"{preset}.json").write_text(f"{text}\n")
        print(preset, flush=True)


if __name__ == "__main__":
    main()
