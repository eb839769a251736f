#!/usr/bin/env python3
"""Plans the published presets of 100 million parameters and more, and prints the table in configs/README.md.

    .venv/bin/python launch/tables/plan_table.py [--plan] [--only bert_base,gpt2] [--plans configs/plans.jsonl]

Needs libtpu for --plan, but no TPU. --plan compiles the presets that this version of libtpu has not planned yet: a row
on its topology and mesh and with its flags, a preset without a row on the smallest of TOPOLOGIES where the FLOPs of its
longest phase take at most MAX_DAYS at half the peak, over the first mesh of `jaxlm plan --search` that fits. Steps of 2
and 4 layers are compiled and extrapolated (jaxlm/analysis/extrapolate.py), or the whole step where that cannot be or
layers are a loop; with more microbatches or recomputed activations where it does not fit. That takes 5 to 15 minutes a
preset on a core. --plans has one JSON object a plan, of which the last one of a preset counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jaxlm.analysis.compilation import prepare_environment, topology_devices
from jaxlm.analysis.extrapolate import with_layers
from jaxlm.analysis.plan import Plan, plan
from jaxlm.analysis.search import search, variants
from jaxlm.analysis.step import open_stand_in
from jaxlm.errors import UserError
from jaxlm.fields import with_value
from jaxlm.parallel.mesh import MeshConfig
from jaxlm.parallel.peaks import peak_flops
from jaxlm.runs.resolve import resolve
from jaxlm.runs.session import Session

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
TOPOLOGIES = ("v5e:4x4", "v5e:8x8", "v5e:16x16", "4xv5e:16x16", "16xv5e:16x16", "v5p:16x16x16")
LIBTPU = importlib.metadata.version("libtpu") if importlib.util.find_spec("libtpu") else None
MAX_DAYS = 10
MIN_PARAMETERS = 100e6
KEPT = (
    "topology", "devices", "mesh", "batch_size", "length", "parameters", "fits", "hbm_bytes_per_chip",
    "predicted_step_seconds", "predicted_mfu", "predicted_bound", "exposed_collective_seconds", "tokens_per_day",
    "steps", "days", "chip_hours", "compiler_message", "changes", "is_extrapolated",
)
COLUMNS = ("preset", "batch × length", "topology", "mesh", "flags", "rows a chip", "by", "HBM a chip", "step",
           "collectives", "bound by", "MFU", "tokens a day", "days", "chip-hours")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--plan", action="store_true", help="compile the presets that this libtpu has not planned")
    parser.add_argument("--only", default="", help="names of presets, with commas between")
    parser.add_argument("--plans", type=Path, default=CONFIGS / "plans.jsonl", help="file of the plans")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else sorted(path.stem for path in CONFIGS.glob("*.py"))
    lines = options.plans.read_text().splitlines() if options.plans.exists() else []
    plans = {plan["preset"]: plan for plan in map(json.loads, lines)}
    if options.plan:
        prepare_environment()
        for name in names:
            row = plans.get(name)
            if (row is None or row["libtpu"] != LIBTPU) and (found := plan_preset(name, row)):
                with options.plans.open("a") as file:
                    file.write(json.dumps(found) + "\n")
                print(table_line(cells(found)), flush=True)
        return 0
    print(table_line(COLUMNS))
    print("|---" * len(COLUMNS) + "|")
    for name in names:
        if name in plans:
            print(table_line(cells(plans[name])))
    return 0


def plan_preset(name: str, row: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the plan of a preset, on the topology and mesh of its row if it has one; None for a small preset."""
    experiment = resolve(str(CONFIGS / f"{name}.py")).experiment
    shapes = jax.eval_shape(experiment.objective.init, jax.random.key(0))
    if sum(leaf.size for leaf in jax.tree.leaves(shapes)) < MIN_PARAMETERS:
        return None
    phases, steps = experiment.phases, experiment.train.steps
    number = max(phases, key=lambda phase: (phase.last or steps) - phase.after).number
    session = open_stand_in(experiment, report=lambda line: print(f"{name}: {line}", file=sys.stderr), phase=number)
    found = None
    try:
        for found in row_plans(session, row) if row else search_plans(session):
            if found.fits:
                break
    except UserError as error:
        print(f"{name}: {error}", file=sys.stderr)
    if found is None:
        return None
    figures = {key: value for key, value in found.to_json().items() if key in KEPT}
    figures["changes"] = {key: value for key, value in found.changes.items() if not key.startswith("mesh.")}
    figures["phase"] = number if len(phases) > 1 else None
    return {"preset": name, "libtpu": LIBTPU, "jax": jax.__version__} | figures


def row_plans(session: Session, row: dict[str, Any]) -> Iterator[Plan]:
    """Yield the plan of a row's step, then of variants that need less memory."""
    for flag, value in row["changes"].items():
        session = dataclasses.replace(session, experiment=with_value(session.experiment, flag, value))
    for variant, flags in variants(session, MeshConfig(**row["mesh"]), len(topology_devices(row["topology"]))):
        try:
            found = plan(variant, row["topology"], extrapolate=True)
        except UserError:
            found = plan(variant, row["topology"])
        yield dataclasses.replace(found, changes=row["changes"] | flags)


def search_plans(session: Session) -> Iterator[Plan]:
    """Yield the plans of a search on the smallest topology on which the run takes at most MAX_DAYS."""
    try:
        can_extrapolate = bool(with_layers(session, 2))
    except UserError:
        can_extrapolate = False
    yield from search(session, smallest_topology(session, session.experiment.train.steps), can_extrapolate)


def smallest_topology(session: Session, steps: int) -> str:
    """Return the first topology on which `steps` times this step's FLOPs take at most MAX_DAYS at half the peak.

    If there is none, it is the last one.
    """
    t, length = session.experiment.train, session.experiment.data.length
    flops = steps * session.objective.step_flops(length, t.batch_size)
    for topology in TOPOLOGIES:
        devices = topology_devices(topology)
        if flops / len(devices) / (peak_flops(devices[0]) / 2) <= 86400 * MAX_DAYS:
            break
    return topology


def cells(plan: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a planned preset."""
    mesh = plan["mesh"]
    rows = plan["batch_size"] / (mesh["data"] * mesh["fsdp"])
    source = "2 and 4 layers" if plan.get("is_extrapolated") else "whole step"
    start = (
        f"`{plan['preset']}`" + (f", phase {plan['phase']}" if plan.get("phase") else ""),
        f"{plan['batch_size']:,} × {plan['length']:,}", plan["topology"],
        ", ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1),
        " ".join(f"`--{key} {value}`" for key, value in plan["changes"].items()) or "–",
        f"{rows:,.0f}", source,
        f"{plan['hbm_bytes_per_chip'] / 2**30:.1f} GiB",
    )
    if not plan["fits"]:
        return (*start, "does not fit", *["–"] * (len(COLUMNS) - len(start) - 1))
    step, exposed = plan["predicted_step_seconds"], plan["exposed_collective_seconds"]
    return (
        *start, f"{step * 1e3:,.1f} ms", f"{exposed / step:.0%}", plan["predicted_bound"],
        f"{plan['predicted_mfu'] or 0:.0%}", f"{plan['tokens_per_day'] / 1e9:,.1f} billion",
        f"{plan['days']:,.2f}", f"{plan['chip_hours']:,.0f}",
    )


def table_line(cells: tuple[str, ...]) -> str:
    """Return a line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
