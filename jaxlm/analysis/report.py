"""Plans as text: one plan in full, or a line of a table for each of several."""

from __future__ import annotations

import math

from jaxlm.analysis.hlo import asynchronous_share
from jaxlm.analysis.kernels import KERNEL_PEAK_SHARE
from jaxlm.analysis.plan import DAY, Plan
from jaxlm.analysis.step import describe_vocabulary, mesh_text
from jaxlm.runs.session import Session

CAVEAT = (
    "ms, MFU and tokens/s are a prediction: compute by the TPU compiler's cycles, on GPUs by a roofline, collectives "
    "by the links' published bandwidths."
)


def heading(session: Session, first: str) -> str:
    """Return the lines above the table of plans, whose first column is `first`."""
    experiment = session.experiment
    return (
        f"{type(experiment.objective).__name__}, batch {experiment.train.batch_size} x {experiment.data.length} over "
        f"all chips, {describe_vocabulary(session)}\n\n"
        f"{first:<14}{'chips':>6}  {'fits':<5}{'HBM/chip':>10}{'of':>10}{'FLOPs/chip':>12}"
        f"{'ms':>10}{'MFU':>7}{'tokens/s':>11}  bound by"
    )


def table_row(plan: Plan, name: str) -> str:
    """Return the line of one plan, after the name of its topology or mesh, with the flags besides the mesh."""
    p = plan.prediction
    time = ("-", "-", "-", "")
    if p:
        time = (f"{p.seconds * 1e3:,.2f}", _percent(plan.mfu(p.seconds)), si(plan.tokens_per_second), p.bound)
    flags = (f"--{flag} {value}" for flag, value in plan.changes.items() if not flag.startswith("mesh."))
    return "  ".join([
        f"{name:<14}{plan.devices:>6}  {'yes' if plan.fits else 'NO':<5}{gib(plan.step.hbm_bytes):>10}"
        f"{gib(plan.hbm_limit_bytes):>10}{si(plan.flops_per_step / plan.devices):>12}"
        f"{time[0]:>10}{time[1]:>7}{time[2]:>11}  {time[3]}", *flags,
    ]).rstrip()


def describe(plan: Plan) -> str:
    """Return a plan as text."""
    step, used = plan.step, f"{gib(plan.step.hbm_bytes)} of {gib(plan.hbm_limit_bytes)} a chip"
    over = step.hbm_bytes - plan.hbm_limit_bytes
    lines = [
        f"{plan.topology or 'Here'}: {plan.devices} x {plan.device_kind}, mesh {mesh_text(plan.mesh)}; "
        f"{plan.parameters:,} parameters, batch {plan.batch_size} x {plan.length}, {plan.vocabulary}",
        "",
        f"It fits: {used}, {gib(-over)} left." if plan.fits
        else f"It does not fit: {used}, {over:,} bytes ({gib(over)}) over.",
    ]
    lines += [f"  compiler: {step.message}"] if step.message else []
    lines += [f"  {gib(size):>10}  {kind.replace('_', ' ')}" for kind, size in step.hbm_by_kind.items()]
    if not plan.fits:
        lines.append("  Try a larger --mesh.fsdp, a smaller --train.batch-size, --train.accumulate or, unless the "
                     "model is reversible, --objective.model.remat full.")
    source = ", extrapolated from few layers." if plan.is_extrapolated else "."
    flops = (f"{si(plan.flops_per_step)}FLOPs a step by formula, {si(plan.flops_per_step / plan.devices)}FLOPs a chip"
             if plan.flops_per_step else "No formula counts its FLOPs")
    lines += ["", f"{flops}; compiled in {step.compile_seconds:,.1f} s{source}"]
    return "\n".join(lines + _time_lines(plan) + _collective_lines(plan))


def _time_lines(plan: Plan) -> list[str]:
    e, p = plan.step.estimate, plan.prediction
    if e is None:
        return [f"No estimate of its time: the clock of {plan.device_kind} is not known."] if plan.fits else []
    lines = [
        f"{'Roofline' if e.is_roofline else 'Predicted'}: {p.seconds * 1e3:,.2f} ms a step, MFU "
        f"{_percent(plan.mfu(p.seconds))}, bound by {p.bound}; collectives make {p.collective_seconds * 1e3:,.2f} ms "
        "of it."
    ]
    if measured := plan.measured_step_seconds:
        error = p.seconds / measured - 1
        lines.append(f"Measured: {measured * 1e3:,.2f} ms, MFU {_percent(plan.mfu(measured))}; the prediction is "
                     f"{abs(error):.0%} too {'long' if error > 0 else 'short'}.")
    hours = plan.chip_hours and f"{plan.chip_hours:,.{0 if plan.chip_hours >= 10 else 2}f}"
    run = f"; {plan.steps:,} steps take {_duration(plan.days)}, {hours} chip-hours" if plan.days else ""
    cost = f", {plan.price * plan.chip_hours:,.0f} USD" if plan.days and plan.price else ""
    lines.append(f"{si(DAY * plan.tokens_per_second)}tokens a day{run}{cost}.")
    flops_seconds = plan.flops_per_step / plan.devices / plan.peak_flops_per_chip
    lines += [
        f"Assumed: {e.method} ({si(plan.peak_flops_per_chip)}FLOP/s and {si(plan.bandwidth_per_chip)}B/s). A GPU "
        f"executes {si(e.executed_flops)}FLOPs and moves {gib(e.bytes_accessed)}. An H100 took up to 10 % longer."
    ] if e.is_roofline else [
        f"Estimated by {e.method}, without collectives: {e.seconds * 1e3:,.2f} ms a step, MFU "
        f"{_percent(plan.mfu(e.seconds))} of {si(plan.peak_flops_per_chip)}FLOP/s "
        f"({_percent(plan.mfu(e.seconds, e.executed_flops))} by the {si(e.executed_flops)}FLOPs that a chip executes).",
        f"Roofline: {plan.roofline_seconds * 1e3:,.2f} ms (by FLOPs {flops_seconds * 1e3:,.2f} ms; "
        f"{gib(e.bytes_accessed)} of memory traffic at {si(plan.bandwidth_per_chip)}B/s).",
    ]
    if step_kernels := plan.step.kernels:
        lines.append("Kernels: " + ", ".join(f"{times} x {name}" for name, times in step_kernels.items()) + ".")
    if e.kernels and e.kernels.seconds:
        charged = f", {e.kernels.charged} charged by their FLOPs at {KERNEL_PEAK_SHARE:.0%} of the peak until " \
                  "launch/tables/count_kernels.py counts them" if e.kernels.charged else ""
        lines.append(f"Pallas kernels take {e.kernels.seconds * 1e3:,.2f} ms of it: {e.kernels.counted} counted by the "
                     f"compiler's schedule{charged}.")
    top = plan.top_operations()
    return lines + (["", f"{'ms':>10}{'share':>8}{'times':>7}  operation"] if top else []) + [
        f"{one['seconds'] * 1e3:>10,.2f}{one['share']:>8.1%}{one['executions']:>7}  {one['name']}" for one in top
    ]


def _collective_lines(plan: Plan) -> list[str]:
    totals = plan.step.collectives
    if not totals:
        return ["", "No collectives: each chip works alone."] if plan.fits else []
    heads = f"{'count':>8}{'bytes':>14}{'ms':>10}{'overlapping':>14}{'bytes':>14}"
    lines = ["", f"{'collectives a step, a chip':<28}{heads}"]
    lines += [
        f"  {kind:<26}{item.count:>8}{gib(item.bytes):>14}{item.seconds * 1e3:>10,.2f}{item.asynchronous_count:>14}"
        f"{gib(item.asynchronous_bytes):>14}" for kind, item in totals.items()
    ]
    unknown = [kind for kind, item in totals.items() if item.bytes and not item.seconds]
    lines.append(f"{asynchronous_share(totals):.0%} of these bytes overlap with compute; ms by the links' published "
                 "bandwidths.")
    if unknown:
        lines.append(f"The bandwidth of {plan.device_kind} for {', '.join(unknown)} is not known: they count 0 ms.")
    return lines


def _duration(days: float) -> str:
    """Return a time as text in its largest unit: "5.3 hours"."""
    units = ((days, "days"), (24 * days, "hours"))
    number, unit = next((unit for unit in units if unit[0] >= 1), (1440 * days, "minutes"))
    return f"{number:,.1f} {unit}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def gib(size: float) -> str:
    """Return a size in bytes with a binary prefix: "1.50 GiB"."""
    power = min(3, int(math.log2(abs(size) or 1) / 10))
    return f"{size / 1024**power:,.{2 * (power > 0)}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def si(value: float) -> str:
    """Return a number with a decimal prefix: "23.3 T"."""
    power = min(6, int(math.log10(max(value * 1.00051, 1)) / 3))  # 999.5 is rounded up
    return f"{value / 1000**power:,.3g} {('', 'k', 'M', 'G', 'T', 'P', 'E')[power]}"
