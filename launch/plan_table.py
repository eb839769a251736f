#!/usr/bin/env python3
"""Plans the published presets of 100 million parameters and more, and prints the table in configs/README.md.

    .venv/bin/python launch/plan_table.py [--outline | --plan] [--only bert_base,gpt2] [--plans configs/plans.jsonl]

Needs libtpu for --outline and --plan, but no TPU. Each preset takes the smallest of TOPOLOGIES on which its published
steps take at most MAX_DAYS by formula (jaxlm/analysis/outline.py), and the mesh there that is the fastest by formula.
--outline writes that formula's figures, in seconds a preset. --plan compiles steps of 2 and 4 layers and extrapolates
(jaxlm/analysis/extrapolate.py), or the whole step where that cannot be or layers are a loop; with more microbatches or
recomputed activations where it does not fit. That takes some minutes a preset on two cores. --plans has one JSON object
a plan, of which the last one of a preset counts; an interrupted table goes on with the presets that it lacks.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
TOPOLOGIES = ("v5e:4x4", "v5e:8x8", "v5e:16x16", "4xv5e:16x16", "16xv5e:16x16", "v5p:16x16x16")
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
    parser.add_argument("--outline", action="store_true", help="outline the presets that the file lacks")
    parser.add_argument("--plan", action="store_true", help="compile the presets without a compiled plan in the file")
    parser.add_argument("--only", default="", help="names of presets, with commas between")
    parser.add_argument("--plans", type=Path, default=CONFIGS / "plans.jsonl", help="file of the plans")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else sorted(path.stem for path in CONFIGS.glob("*.py"))
    lines = options.plans.read_text().splitlines() if options.plans.exists() else []
    plans = {plan["preset"]: plan for plan in map(json.loads, lines)}
    if options.plan or options.outline:
        from jaxlm.analysis import compilation

        compilation.require_compiler()
        compilation.prepare_environment()
        for name in names:
            known = plans.get(name, {}).get("libtpu") if options.plan else plans.get(name)
            if not known and (found := plan_preset(name, options.plan)):
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


def plan_preset(name: str, is_compiled: bool) -> dict[str, Any] | None:
    """Return the plan of a preset on the first topology that is fast enough by formula; None for a small preset.

    Args:
        name: Name of the preset.
        is_compiled: Whether to compile the step, instead of outlining it.
    """
    import jax

    from jaxlm.analysis.extrapolate import can_extrapolate
    from jaxlm.analysis.outline import outlines
    from jaxlm.analysis.plan import plan
    from jaxlm.analysis.step import open_stand_in
    from jaxlm.errors import UserError
    from jaxlm.runs.resolve import resolve

    experiment = resolve(str(CONFIGS / f"{name}.py")).experiment
    shapes = jax.eval_shape(experiment.objective.init, jax.random.key(0))
    if sum(leaf.size for leaf in jax.tree.leaves(shapes)) < MIN_PARAMETERS:
        return None
    session = open_stand_in(experiment)
    for topology in TOPOLOGIES:
        steps = outlines(session, topology)
        if steps and steps[0].seconds * experiment.train.steps < 86400 * MAX_DAYS:
            break
    else:
        print(f"{name}: more than {MAX_DAYS} days on every topology", file=sys.stderr)
        return None
    if not is_compiled:
        flags = accumulation(experiment, steps[0].accumulate)
        return {"preset": name, "libtpu": None, "changes": flags} | outlined(experiment, steps[0], topology)
    found, is_extrapolated = None, can_extrapolate(session)
    try:
        # The fastest mesh by formula; another one only where no variant fits on it.
        for variant, flags in (one for step in steps for one in compiled_variants(session, step, topology)):
            found = plan(variant, topology, is_extrapolated=is_extrapolated) | {"changes": flags}
            if found["fits"]:
                break
    except UserError as error:
        print(f"{name}: {error}", file=sys.stderr)
    return found and {
        "preset": name, "libtpu": importlib.metadata.version("libtpu"), "jax": jax.__version__,
        **{key: found[key] for key in KEPT},
    }


def accumulation(experiment: Any, accumulate: int) -> dict[str, int]:
    """Return the flag for a number of microbatches other than the experiment's."""
    return {"train.accumulate": accumulate} if accumulate != experiment.train.accumulate else {}


def compiled_variants(session: Any, outline: Any, topology: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the session on the mesh of an outline, then variants that take less memory, each with its flags."""
    from jaxlm.analysis.compilation import topology_devices
    from jaxlm.analysis.search import variants

    first = accumulation(session.experiment, outline.accumulate)
    changed = session.replace(train=dataclasses.replace(session.experiment.train, accumulate=outline.accumulate))
    for variant, changes in variants(changed, outline.mesh, len(topology_devices(topology))):
        yield variant, {key: value for key, value in (first | changes).items() if not key.startswith("mesh.")}


def outlined(experiment: Any, outline: Any, topology: str) -> dict[str, Any]:
    """Return the figures of an outlined step under the keys of a compiled plan."""
    from jaxlm.analysis.compilation import topology_devices
    from jaxlm.parallel.mesh import AXES
    from jaxlm.parallel.peaks import peak_flops

    devices, t, length = topology_devices(topology), experiment.train, experiment.data.length
    days = t.steps * outline.seconds / 86400
    return {
        "topology": topology, "devices": len(devices), "batch_size": t.batch_size, "length": length, "fits": True,
        "mesh": dict(zip(AXES, outline.mesh.shape(len(devices)), strict=True)), "parameters": outline.num_params,
        "hbm_bytes_per_chip": outline.hbm_bytes, "predicted_step_seconds": outline.seconds,
        "predicted_mfu": outline.flops / len(devices) / outline.seconds / peak_flops(devices[0]),
        "predicted_bound": outline.bound, "exposed_collective_seconds": outline.exposed_seconds,
        "tokens_per_day": 86400 * t.batch_size * length / outline.seconds, "steps": t.steps, "days": days,
        "chip_hours": 24 * len(devices) * days,
    }


def cells(plan: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a planned preset."""
    mesh = plan["mesh"]
    rows = plan["batch_size"] / (mesh["data"] * mesh["fsdp"])
    source = "formula"
    if plan["libtpu"]:
        source = "2 and 4 layers" if plan.get("is_extrapolated") else "whole step"
    start = (
        f"`{plan['preset']}`", f"{plan['batch_size']:,} × {plan['length']:,}", plan["topology"],
        ", ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1),
        " ".join(f"`--{key} {value}`" for key, value in plan["changes"].items()) or "–",
        f"{rows:,.0f}", source,
        f"{plan['hbm_bytes_per_chip'] / 2**30:.1f} GiB" if plan["libtpu"] else "–",
    )
    if not plan["fits"]:
        return (*start, "does not fit", *["–"] * (len(COLUMNS) - len(start) - 1))
    step, exposed = plan["predicted_step_seconds"], plan["exposed_collective_seconds"]
    return (
        *start, f"{step * 1e3:,.1f} ms", f"{exposed / step:.0%}", plan["predicted_bound"],
        f"{plan['predicted_mfu']:.0%}", f"{plan['tokens_per_day'] / 1e9:,.1f} billion",
        f"{plan['days']:,.2f}", f"{plan['chip_hours']:,.0f}",
    )


def table_line(cells: tuple[str, ...]) -> str:
    """Return a line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
