"""Compile the real train step for a TPU topology, on a machine without TPUs, or for the devices of this machine.

jaxlm plan CONFIG --topology v5e:16x16[,2xv5e:16x16 …] [--search] [--extrapolate] [--price USD]
    [--json] [--any.field VALUE …]
jaxlm plan CONFIG [--json] [--any.field VALUE …]

The plan says whether the step fits, and predicts its time: the TPU compiler's cycles, and the collectives by the
published bandwidths of the links. Several topologies are printed as one table. --search tries meshes, with more
microbatches or remat where a step does not fit, and prints the fastest last. --extrapolate compiles 2 and 4 layers and
extrapolates: minutes where all layers take up to an hour. Without --topology the plan is for the devices here, by their
peak and bandwidth, with the measured time of the step beside the prediction.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jaxlm.commands.common import config_parser, output_option, parse_options, resolve_config, start_jax
from jaxlm.paths import check_output


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code."""
    parser = config_parser("jaxlm plan", __doc__)
    parser.add_argument("--topology", default=None,
                        help="generation and chips (v5e:16x16, v4:2x2x2, …) or a slice of Google Cloud (v5litepod-16, "
                             "v4-32, …); several with commas between; "
                             "without it: the devices of this machine")
    parser.add_argument("--search", action="store_true", help="try meshes on one topology for the fastest that fits")
    parser.add_argument("--extrapolate", action="store_true",
                        help="compile 2 and 4 layers instead of all, and extrapolate")
    parser.add_argument("--price", type=float, default=0.0, metavar="USD", help="price of a chip for an hour")
    output_option(parser, "--hlo", "write the compiled module's text (of one topology)")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output, nothing else")
    options, flags = parse_options(parser, arguments)
    experiment = resolve_config(parser, options, flags).experiment
    from jaxlm.analysis import compilation

    check_output(options.hlo, "--hlo", options.overwrite)
    if options.topology is None:
        for name in ("search", "price", "extrapolate"):
            if getattr(options, name):
                parser.error(f"--{name} needs a --topology")
        return here(experiment, options)
    topologies = options.topology.split(",")
    if (options.hlo or options.search) and len(topologies) > 1:
        parser.error(f"--{'hlo' if options.hlo else 'search'} needs one --topology")
    if options.hlo and options.extrapolate:
        parser.error("--hlo needs the whole step; leave out --extrapolate")
    compilation.require_compiler()
    compilation.prepare_environment()
    from jaxlm.analysis.plan import plan as plan_step
    from jaxlm.analysis.step import describe_vocabulary, open_stand_in

    session = open_stand_in(experiment, options.config, report=say)
    if options.search:
        return search(session, topologies[0], options)
    if len(topologies) == 1:
        hlo = options.hlo and Path(options.hlo)
        plan = priced(plan_step(session, topologies[0], hlo, options.extrapolate, say), options)
        print(json.dumps(plan) if options.json else report(plan) + short_rows(experiment))
        return 0
    rows = (priced(plan_row(session, name, options.extrapolate), options) for name in topologies)
    if options.json:
        print(json.dumps({"topologies": list(rows)}))
        return 0
    for index, row in enumerate(rows):
        if index == 0:  # after the first compilation, which finds the user's mistakes
            print(heading(experiment, describe_vocabulary(session)))
        print(table_row(row, row["topology"]), flush=True)
    print(f"\n{CAVEAT}{short_rows(experiment)}")
    return 0


CAVEAT = (
    "ms, MFU and tokens/s are a prediction: compute by the TPU compiler's cycles, collectives by the links' published "
    "bandwidths."
)


def say(line: str) -> None:
    """Print a progress message on standard error."""
    print(line, file=sys.stderr, flush=True)


def priced(plan: dict[str, Any], options: Any) -> dict[str, Any]:
    """Return the plan with "cost", the price of all its steps; None without --price."""
    hours = plan.get("chip_hours")
    return plan | {"cost": options.price * hours if options.price and hours else None}


def here(experiment: Any, options: Any) -> int:
    """Print the plan for the devices of this machine and return the exit code."""
    start_jax()
    from jaxlm.analysis.local import plan_here
    from jaxlm.analysis.step import open_stand_in
    from jaxlm.runs.load import teacher_arrays

    session = open_stand_in(experiment, options.config, teacher_arrays, say)
    plan = plan_here(session, options.hlo and Path(options.hlo), say)
    print(json.dumps(plan) if options.json else local_report(plan) + short_rows(experiment))
    return 0


def local_report(plan: dict[str, Any]) -> str:
    """Return the plan for the devices of this machine as text."""
    p = SimpleNamespace(**plan)
    lines = [
        f"Here: {p.devices} x {p.device_kind}, mesh {', '.join(f'{a} {n}' for a, n in p.mesh.items())}; "
        f"{p.parameters:,} parameters, batch {p.batch_size} x {p.length}, {p.vocabulary}",
        "",
        f"It {'fits' if p.fits else 'does not fit'}: {gib(p.hbm_bytes_per_chip)} of {gib(p.hbm_limit_bytes)} a device.",
        *(f"  {gib(size):>10}  {kind.replace('_', ' ')}" for kind, size in p.hbm_by_kind.items()),
        "",
        f"{si(p.flops_per_step)}FLOPs a step by formula; a device executes {si(p.executed_flops_per_chip)}FLOPs and "
        f"moves {gib(p.bytes_accessed_per_chip)}.",
    ]
    if p.measured_step_seconds:
        by = [("published", "measured")[flag] for flag in (p.peak_is_measured, p.bandwidth_is_measured)]
        lines += [
            f"Predicted: {p.predicted_step_seconds * 1e3:,.2f} ms a step, by {si(p.peak_flops_per_chip)}FLOP/s "
            f"({by[0]}) and {si(p.bandwidth_per_chip)}B/s ({by[1]}).",
            f"Measured: {p.measured_step_seconds * 1e3:,.2f} ms, MFU {p.measured_mfu:.1%}; the prediction is "
            f"{abs(p.relative_error):.0%} too {'long' if p.relative_error > 0 else 'short'}. "
            f"{si(p.tokens_per_day)}tokens a day"
            + (f"; {p.steps:,} steps take {p.days:,.2f} days." if p.days else "."),
        ]
    return "\n".join(lines + [
        f"{kind}: {item['count']} of {gib(item['bytes'])} in all." for kind, item in p.collectives.items()
    ])


def search(session: Any, topology: str, options: Any) -> int:
    """Print the plans of several meshes, or them and the fastest as one JSON object, and return the exit code."""
    from jaxlm.analysis import search as searching
    from jaxlm.analysis.step import describe_vocabulary

    plans = []
    for found in searching.search(session, topology, options.extrapolate, say):
        if not plans and not options.json:
            print(heading(session.experiment, describe_vocabulary(session), "mesh"))
        plans.append(priced(found, options))
        if not options.json:
            print(table_row(plans[-1], " x ".join(map(str, found["mesh"].values()))) + _changes(found), flush=True)
    best = searching.fastest(plans)
    if options.json:
        print(json.dumps({"plans": plans, "fastest": best}))
    elif best is None:
        print("\nNone fits; take more chips.")
    else:
        flags = " ".join(f"--{name} {value}" for name, value in best["changes"].items())
        print(f"\nFastest: {flags}\n\n{report(best)}")
    return 0


def _changes(plan: dict[str, Any]) -> str:
    """Return the flags besides the mesh, as the end of a line of the table."""
    others = {name: value for name, value in plan["changes"].items() if not name.startswith("mesh.")}
    return "".join(f"  --{name} {value}" for name, value in others.items())


def short_rows(experiment: Any) -> str:
    """Return a note that the first steps of a schedule with short rows are not in the plan; "" without such steps."""
    t, length = experiment.train, experiment.data.length
    return (
        f"\nThis plan is for steps with rows of {length} tokens; the first {t.short_steps:,} steps use rows of "
        f"{t.short_length}."
        if t.short_steps else ""
    )


def plan_row(session: Any, name: str, is_extrapolated: bool) -> dict[str, Any]:
    """Return the plan of a topology, or the reason why there is none."""
    from jaxlm.analysis.compilation import topology_devices
    from jaxlm.analysis.plan import plan
    from jaxlm.errors import UserError

    row: dict[str, Any] = {"topology": name, "devices": None, "fits": None}
    try:
        row["devices"] = len(topology_devices(name))
        return plan(session, name, is_extrapolated=is_extrapolated, report=say)
    except UserError as error:
        return row | {"error": str(error)}


def heading(experiment: Any, vocabulary: str, first: str = "topology") -> str:
    """Return the lines above the table of topologies or meshes."""
    t = experiment.train
    return (
        f"{type(experiment.objective).__name__}, batch {t.batch_size} x {experiment.data.length} over all chips, "
        f"{vocabulary}\n\n"
        f"{first:<14}{'chips':>6}  {'fits':<5}{'HBM/chip':>10}{'of':>10}{'FLOPs/chip':>12}"
        f"{'ms':>10}{'MFU':>7}{'tokens/s':>11}  bound by"
    )


def table_row(row: dict[str, Any], name: str) -> str:
    """Return the line of one plan, after the name of its topology or mesh."""
    start = f"{name:<14}{row['devices'] or '-':>6}  "
    if row["fits"] is None:
        return f"{start}-     {row['error']}"
    line = (
        f"{start}{'yes' if row['fits'] else 'NO':<5}{gib(row['hbm_bytes_per_chip']):>10}"
        f"{gib(row['hbm_limit_bytes']):>10}{si(row['flops_per_step_per_chip']):>12}"
    )
    if not row["predicted_step_seconds"]:
        return line + f"{'-':>10}{'-':>7}{'-':>11}"
    return (
        f"{line}{row['predicted_step_seconds'] * 1e3:>10,.2f}{row['predicted_mfu']:>7.1%}"
        f"{si(row['tokens_per_day'] / 86400):>11}  {row['predicted_bound']}"
    )


def report(plan: dict[str, Any]) -> str:
    """Return the plan of one topology as text."""
    p = SimpleNamespace(**plan)
    lines = [
        f"{p.topology}: {p.devices} x {p.device_kind}, mesh {', '.join(f'{a} {n}' for a, n in p.mesh.items())}; "
        f"{p.parameters:,} parameters, batch {p.batch_size} x {p.length}, {p.vocabulary}",
        "",
    ]
    memory = f"{gib(p.hbm_bytes_per_chip)} of {gib(p.hbm_limit_bytes)} HBM a chip"
    if p.fits:
        lines.append(f"It fits: {memory}, {gib(p.headroom_bytes)} left.")
    else:
        lines.append(f"It does not fit: {memory}, {p.bytes_over:,} bytes ({gib(p.bytes_over)}) over.")
        lines += [f"  compiler: {p.compiler_message}"] if p.compiler_message else []
    lines += [f"  {gib(size):>10}  {kind.replace('_', ' ')}" for kind, size in p.hbm_by_kind.items()]
    if not p.fits:
        lines.append("  Try a larger --mesh.fsdp, a smaller --train.batch-size, --train.accumulate or, unless the "
                     "model is reversible, --objective.model.remat full.")
    lines += ["", f"{si(p.flops_per_step)}FLOPs a step by formula, {si(p.flops_per_step_per_chip)}FLOPs a chip; "
                  f"compiled in {p.compile_seconds:,.1f} s"
                  + (", extrapolated from 2 and 4 layers." if p.is_extrapolated else ".")]
    return "\n".join(lines + _estimate_lines(p) + _collective_lines(p))


def _estimate_lines(p: SimpleNamespace) -> list[str]:
    if not p.estimated_step_seconds:
        return [f"No estimate of its time: the clock of {p.device_kind} is not known."] if p.fits else []
    flops_seconds = p.flops_per_step_per_chip / p.peak_flops_per_chip
    lines = [
        f"Predicted: {p.predicted_step_seconds * 1e3:,.2f} ms a step, MFU {p.predicted_mfu:.1%}, bound by "
        f"{p.predicted_bound}; collectives make {p.exposed_collective_seconds * 1e3:,.2f} ms of it. "
        f"{si(p.tokens_per_day)}tokens a day" + (
            f"; {p.steps:,} steps take {p.days:,.2f} days, {p.chip_hours:,.0f} chip-hours" if p.days else ""
        ) + (f", {p.cost:,.0f} USD" if p.cost else "") + ".",
        f"Estimated by the TPU compiler's cycles, without collectives: {p.estimated_step_seconds * 1e3:,.2f} ms a "
        f"step, MFU {p.estimated_mfu:.1%} of {si(p.peak_flops_per_chip)}FLOP/s ({p.estimated_executed_mfu:.1%} by the "
        f"{si(p.executed_flops_per_chip)}FLOPs that a chip executes), {p.estimated_tokens_per_second:,.0f} tokens/s.",
        f"Roofline: {p.roofline_seconds * 1e3:,.2f} ms (by FLOPs {flops_seconds * 1e3:,.2f} ms; "
        f"{gib(p.bytes_accessed_per_chip)} of HBM traffic).",
    ]
    if p.estimated_kernel_seconds:
        by = [f"{p.counted_kernels} counted by the compiler's schedule"] if p.counted_kernels else []
        by += [f"{p.charged_kernels} charged by their FLOPs at {p.kernel_peak_share:.0%} of the peak"] \
            if p.charged_kernels else []
        lines.append(f"Pallas kernels take {p.estimated_kernel_seconds * 1e3:,.2f} ms of it: {', '.join(by)}.")
    lines += ["", f"{'ms':>10}{'share':>8}{'times':>7}  operation"]
    return lines + [
        f"{op['seconds'] * 1e3:>10,.2f}{op['share']:>8.1%}{op['executions']:>7}  {op['name']}"
        for op in p.top_operations
    ]


def _collective_lines(p: SimpleNamespace) -> list[str]:
    if not p.collectives:
        return ["", "No collectives: each chip works alone."] if p.fits else []
    heads = f"{'count':>8}{'bytes':>14}{'ms':>10}{'overlapping':>14}{'bytes':>14}"
    lines = ["", f"{'collectives a step, a chip':<28}{heads}"]
    lines += [
        f"  {kind:<26}{item['count']:>8}{gib(item['bytes']):>14}{item['seconds'] * 1e3:>10,.2f}"
        f"{item['asynchronous_count']:>14}{gib(item['asynchronous_bytes']):>14}"
        for kind, item in p.collectives.items()
    ]
    unknown = [kind for kind, item in p.collectives.items() if item["bytes"] and not item["seconds"]]
    lines.append(f"{p.asynchronous_share:.0%} of these bytes overlap with compute; ms by the links' published "
                 "bandwidths.")
    if unknown:
        lines.append(f"The bandwidth of {p.device_kind} for {', '.join(unknown)} is not known: they count 0 ms.")
    return lines


def gib(size: float) -> str:
    """Return a size in bytes with a binary prefix: "1.50 GiB"."""
    power = min(3, int(math.log2(abs(size) or 1) / 10))
    return f"{size / 1024**power:,.{2 * (power > 0)}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def si(value: float) -> str:
    """Return a number with a decimal prefix: "23.3 T"."""
    power = min(5, int(math.log10(max(value, 1)) / 3))
    return f"{value / 1000**power:,.3g} {('', 'k', 'M', 'G', 'T', 'P')[power]}"
