#!/usr/bin/env python3
"""Prints the largest batch of presets on GPUs, with its kernels and roofline, as the table in configs/RESULTS.md.

    .venv/bin/python launch/tables/gpu_table.py --topology h100 --length 512 bert_base roberta_base …

Needs the extra [gpu], but no GPU. Memory is linear in the rows of a batch: steps of ROWS rows a GPU tell how many fit,
and a step of that many, down to a power of two, is compiled for the row of the table. Models are in bfloat16 without
attention dropout. Steps of 2 and 4 layers are extrapolated where layers are not a loop.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from jaxlm.analysis.compilation import prepare_environment, topology_devices
from jaxlm.analysis.plan import Plan, plan
from jaxlm.analysis.report import gib
from jaxlm.analysis.step import open_stand_in
from jaxlm.config.presets import load_preset
from jaxlm.errors import UserError
from jaxlm.runs.session import Session

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
ROWS = (8, 16)
COLUMNS = ("preset", "GPUs", "rows a GPU × length", "memory a GPU", "kernels of attention", "roofline", "MFU",
           "tokens/s a GPU", "collectives not hidden")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("presets", nargs="+", help="names of presets")
    parser.add_argument("--topology", default="h100", help="GPUs, such as h100 or h100:8")
    parser.add_argument("--length", type=int, help="tokens of a row, by default the preset's")
    options = parser.parse_args()
    prepare_environment()
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    for name in options.presets:
        print(f"| {' | '.join(cells(name, largest(name, options.topology, options.length)))} |", flush=True)
    return 0


def largest(name: str, topology: str, length: int | None) -> Plan:
    """Return the plan of the largest batch that fits."""
    gpus = len(topology_devices(topology))
    session = open_stand_in(_for_gpu(load_preset(str(CONFIGS / f"{name}.py")), length), report=_say)
    plans = [_plan(session, rows * gpus, topology) for rows in ROWS]
    low, high = (one.step.hbm_bytes for one in plans)
    room = plans[0].hbm_limit_bytes - low
    rows = ROWS[0] + room * (ROWS[1] - ROWS[0]) // (high - low) if high > low else ROWS[1]
    found = _plan(session, 2 ** (max(rows, 1).bit_length() - 1) * gpus, topology)
    while not found.fits and found.batch_size > gpus:
        found = _plan(session, found.batch_size // 2, topology)
    # The compiler keeps less of larger batches in some steps, so that more rows fit than two small batches tell.
    while 2 * found.step.hbm_bytes < found.hbm_limit_bytes:
        found = _plan(session, 2 * found.batch_size, topology)
    return found


def _for_gpu(experiment: Any, length: int | None) -> Any:
    objective = experiment.objective
    changes = {"dtype": "bfloat16", "attention_dropout": 0.0}
    changes = {key: value for key, value in changes.items() if hasattr(objective.model, key)}
    objective = dataclasses.replace(objective, model=dataclasses.replace(objective.model, **changes))
    data = dataclasses.replace(experiment.data, length=length or experiment.data.length)
    train = dataclasses.replace(experiment.train, accumulate=1, phases="")
    return dataclasses.replace(experiment, objective=objective, data=data, train=train)


def _plan(session: Session, batch_size: int, topology: str) -> Plan:
    session = session.replace(train=dataclasses.replace(session.experiment.train, batch_size=batch_size))
    try:
        return plan(session, topology, extrapolate=True, report=_say)
    except UserError:
        return plan(session, topology, report=_say)


def cells(name: str, found: Plan) -> list[str]:
    """Return the row of the table."""
    kernels = sorted({kernel.removeprefix("__") for kernel in found.step.kernels if "cudnn" in kernel})
    memory = gib(found.step.hbm_bytes) + ("" if found.fits else ", does not fit")
    return [
        f"`{name}`", str(found.devices), f"{found.batch_size // found.devices} × {found.length}",
        memory, ", ".join(kernels) or "none: scores in memory",
        f"{found.seconds * 1e3:,.1f} ms", f"{found.mfu(found.seconds) or 0:.0%}",
        f"{found.tokens_per_second / found.devices:,.0f}", f"{found.prediction.collective_seconds * 1e3:,.1f} ms",
    ]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
