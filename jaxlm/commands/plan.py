"""jaxlm plan CONFIG [--topology v5e:16x16] [--json] [--any.field VALUE …]

Compiles the real train step for a TPU topology on this machine, which needs no TPU, and says whether it fits and what
it costs. Without --topology: a table over sizes of v4, v5e, v5p and v6e.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from jaxlm.commands.common import Parser

if TYPE_CHECKING:
    from jaxlm.analysis.plan import Plan

KINDS = {
    "parameters": "parameters", "optimizer_state": "optimizer state", "batch": "batch",
    "activations_and_workspace": "activations and workspace", "program": "program", "other": "padding",
}


def main(arguments: list[str]) -> int:
    parser = Parser(
        "jaxlm plan", description=__doc__, add_help=False, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", help="a preset (configs/bert_base.py) or a run folder")
    parser.add_argument("--topology", default=None, help="generation and chips: v5e:16x16, v4:2x2x2, v5p:4x4x4, …")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output, nothing else")
    if not arguments or arguments[0] in ("-h", "--help"):
        parser.print_help()
        return 0
    options, rest = parser.parse_known_args(arguments)

    from jaxlm.analysis import plan as planning

    planning.require_compiler()
    planning.prepare_environment()
    from jaxlm.config.flags import override
    from jaxlm.config.presets import load_preset

    experiment = override(load_preset(options.config), rest, f"jaxlm plan {options.config}")
    vocabulary = planning.run_vocabulary(options.config)
    if options.topology:
        result = planning.plan(experiment, options.topology, vocabulary)
        print(json.dumps(result.to_json()) if options.json else report(result) + short_rows(experiment))
        return 0
    if options.json:
        print(json.dumps({"topologies": [_row_json(experiment, name, vocabulary) for name in planning.TABLE]}))
        return 0
    first = True
    for name in planning.TABLE:
        row = _row_json(experiment, name, vocabulary)
        if first:
            print(heading(experiment, planning.described(experiment.objective, vocabulary)))
        first = False
        print(table_row(row), flush=True)
    print(short_rows(experiment), end="\n" if experiment.train.short_steps else "")
    return 0


def short_rows(experiment) -> str:
    """That there are steps which the plan is not of."""
    t, length = experiment.train, experiment.data.length
    return (
        f"\nPlanned are the steps over rows of {length}; the first {t.short_steps:,} read rows of {t.short_length}."
        if t.short_steps else ""
    )


def _row_json(experiment, name: str, vocabulary) -> dict:
    """A plan as JSON; where the mesh or the batch does not suit a topology, the reason instead."""
    from jaxlm.analysis.plan import plan, topology_devices
    from jaxlm.errors import UserError

    devices = len(topology_devices(name))
    try:
        return plan(experiment, name, vocabulary).to_json()
    except UserError as error:
        return {"topology": name, "devices": devices, "fits": None, "error": str(error)}


def heading(experiment, vocabulary: str) -> str:
    t = experiment.train
    return (
        f"{type(experiment.objective).__name__}, batch {t.batch_size} x {experiment.data.length} over all chips, "
        f"{vocabulary}\n\n"
        f"{'topology':<12}{'chips':>6}  {'fits':<5}{'HBM/chip':>10}{'of':>10}{'headroom':>10}{'FLOPs/chip':>12}"
        f"{'tokens/s*':>13}"
    )


def table_row(row: dict) -> str:
    start = f"{row['topology']:<12}{row['devices']:>6}  "
    if row["fits"] is None:
        return f"{start}-     {row['error']}"
    room = gib(row["headroom_bytes"]) if row["fits"] else "-" + gib(row["bytes_over"])
    speed = row["tokens_per_second_at_assumed_mfu"]
    return (
        f"{start}{'yes' if row['fits'] else 'NO':<5}{gib(row['hbm_bytes_per_chip']):>10}"
        f"{gib(row['hbm_limit_bytes']):>10}{room:>10}{si(row['flops_per_step_per_chip']):>12}"
        f"{si(speed) if speed else '?':>13}"
    )


def report(p: Plan) -> str:
    """The plan for people."""
    mesh = ", ".join(f"{axis} {size}" for axis, size in p.mesh.items())
    lines = [
        f"{p.topology}: {p.devices} x {p.device_kind}, mesh {mesh}; {p.parameters:,} parameters, "
        f"batch {p.batch_size} x {p.length}, {p.vocabulary}",
        "",
    ]
    if p.fits:
        lines.append(f"It fits: {gib(p.hbm_bytes)} of {gib(p.hbm_limit)} HBM a chip, {gib(p.headroom)} left.")
    else:
        lines.append(
            f"It does not fit: {gib(p.hbm_bytes)} of {gib(p.hbm_limit)} HBM a chip, {-p.headroom:,} bytes "
            f"({gib(-p.headroom)}) over."
        )
        lines.append(f"  compiler: {p.message}") if p.message else None
    lines += [f"  {gib(size):>10}  {KINDS[kind]}" for kind, size in p.hbm_by_kind.items()]
    if not p.fits:
        lines.append("  Try a larger --mesh.fsdp, a smaller --train.batch-size, --train.accumulate, or "
                     "--objective.model.remat full.")
    lines += ["", f"{si(p.flops)}FLOPs a step by formula, {si(p.flops_per_device)}FLOPs a chip."]
    if p.fits and p.seconds:
        from jaxlm.analysis.plan import ASSUMED_MFU

        speed = p.batch_size * p.length / p.seconds
        lines.append(
            f"If it reached {ASSUMED_MFU:.0%} of the peak of {si(p.peak_flops)}FLOP/s, an assumption: "
            f"{p.seconds * 1e3:,.2f} ms a step, {speed:,.0f} tokens/s."
        )
    if p.traffic:
        lines += ["", f"{'collectives a step, a chip':<28}{'count':>8}{'bytes':>14}{'asynchronous':>14}{'bytes':>14}"]
        for kind, item in p.traffic.items():
            lines.append(
                f"  {kind:<26}{item.count:>8}{gib(item.bytes):>14}{item.asynchronous_count:>14}"
                f"{gib(item.asynchronous_bytes):>14}"
            )
    elif p.fits:
        lines += ["", "No collectives: each chip works alone."]
    return "\n".join(lines)


def gib(size: float) -> str:
    """Bytes in the unit that suits them, powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            return f"{size:,.0f} B" if unit == "B" else f"{size:,.2f} {unit}"
        size /= 1024
    raise AssertionError


def si(value: float) -> str:
    """A number with a prefix, powers of 1000: "23.3 T"."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 1000 or prefix == "P":
            return f"{value:,.3g} {prefix}"
        value /= 1000
    raise AssertionError
