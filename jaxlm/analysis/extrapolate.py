"""Extrapolation of a train step from steps of few layers, which compile in minutes instead of up to an hour.

The layers of a stack are alike, so memory, time and collectives are linear in their number, with two exceptions. The
compiler rematerializes where HBM is short. And the peak of memory may move, from the logits to the update for example,
beyond the depths that are compiled; then the line is too low. Near the limit only the whole step tells whether it fits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from jaxlm.analysis.compilation import CompiledStep, compile_step
from jaxlm.analysis.estimate import Estimate
from jaxlm.analysis.hlo import Traffic
from jaxlm.analysis.step import batch_shapes, input_bytes
from jaxlm.errors import UserError
from jaxlm.runs.session import Session
from jaxlm.types import Report

DEPTHS = (2, 4)
"""Numbers of layers of the steps that are compiled: even, since GPT-3's layers alternate."""
STACKS = ("num_layers", "num_decoder_layers", "generator_num_layers")
"""Fields of a model with the number of layers of a stack."""

Line = Callable[[float, float], float]
"""Function of a figure at both DEPTHS that returns the figure at another depth."""


def compile_extrapolated(
    session: Session, mesh: Mesh, topology: str, report: Report = print
) -> CompiledStep:
    """Compile steps of DEPTHS layers and extrapolate to the session's own depth.

    If one of them does not fit in HBM, neither does the whole step, whose size is then at least that of its inputs.

    Raises:
        UserError: The model cannot be extrapolated, or the compiler refuses a step for another reason than HBM.
    """
    steps: list[CompiledStep] = []
    batch = batch_shapes(session)
    for depth in DEPTHS:
        report(f"A step of {depth} layers:")
        step = compile_step(with_layers(session, depth).program(mesh), batch, topology, report=report)
        if not step.fits:
            inputs = input_bytes(session.program(mesh), batch)
            return step._replace(hbm_by_kind=inputs, hbm_bytes=max(step.hbm_bytes, sum(inputs.values())))
        steps.append(step)
    return extrapolate(*steps, session.objective.model.num_layers)


def with_layers(session: Session, layers: int) -> Session:
    """Return the session with `layers` layers in every stack of its model.

    Raises:
        UserError: The model has no stack of more than DEPTHS layers, stacks of different depths, layers in a loop, or
            layers of which it cannot have so few.
    """
    model = session.objective.model
    depths = stack_depths(model)
    if not is_uniform(model):
        found = ", ".join(f"{name} {depth}" for name, depth in depths.items()) or "no layers"
        found += " in a loop" if getattr(model, "loop_layers", False) else ""
        raise UserError(
            f"--extrapolate is for models of more than {max(DEPTHS)} layers, as many in every stack and not in a loop; "
            f"this {type(model).__name__} has {found}. Leave it out."
        )
    try:
        model = dataclasses.replace(model, **dict.fromkeys(depths, layers))
    except UserError as error:
        raise UserError(
            f"--extrapolate needs {layers} layers in every stack, which {type(model).__name__} cannot have; leave it "
            "out."
        ) from error
    return session.replace(objective=dataclasses.replace(session.objective, model=model))


def stack_depths(model: Any) -> dict[str, int]:
    """Return the fields with the number of layers of each stack of a model, and their values."""
    return {name: depth for name in STACKS if (depth := getattr(model, name, None)) is not None}


def is_uniform(model: Any) -> bool:
    """Return whether all stacks of a model have the same number of layers, more than DEPTHS, and none is a loop."""
    depths = set(stack_depths(model).values())
    return len(depths) == 1 and min(depths) > max(DEPTHS) and not getattr(model, "loop_layers", False)


def can_extrapolate(session: Session) -> bool:
    """Return whether the step can be extrapolated."""
    try:
        with_layers(session, DEPTHS[0])
    except UserError:
        return False
    return True


def extrapolate(small: CompiledStep, large: CompiledStep, layers: int) -> CompiledStep:
    """Extrapolate steps of DEPTHS layers, which fit in HBM, linearly to `layers` layers."""

    def line(low: float, high: float) -> float:
        return high + (high - low) * (layers - DEPTHS[1]) / (DEPTHS[1] - DEPTHS[0])

    by_kind = {kind: round(line(small.hbm_by_kind[kind], size)) for kind, size in large.hbm_by_kind.items()}
    return large._replace(
        hbm_by_kind=by_kind, hbm_bytes=sum(by_kind.values()),
        collectives={
            kind: _traffic(small.collectives.get(kind, Traffic()), item, line)
            for kind, item in large.collectives.items()
        },
        estimate=small.estimate and large.estimate and _estimate(small.estimate, large.estimate, line),
        compile_seconds=small.compile_seconds + large.compile_seconds,
    )


def _traffic(small: Traffic, large: Traffic, line: Line) -> Traffic:
    """Extrapolate what overlaps with compute and what does not, each to no less than nothing."""

    def parts(low: float, high: float, low_hidden: float, high_hidden: float) -> tuple[float, float]:
        hidden = max(line(low_hidden, high_hidden), 0)
        return hidden + max(line(low - low_hidden, high - high_hidden), 0), hidden

    count, hidden_count = parts(small.count, large.count, small.asynchronous_count, large.asynchronous_count)
    size, hidden_size = parts(small.bytes, large.bytes, small.asynchronous_bytes, large.asynchronous_bytes)
    seconds = parts(small.seconds, large.seconds, small.asynchronous_seconds, large.asynchronous_seconds)
    return Traffic(round(count), round(size), round(hidden_count), round(hidden_size), *seconds)


def _estimate(small: Estimate, large: Estimate, line: Line) -> Estimate:
    """Extrapolate the time; `top` keeps operations that are among the longest of both steps."""
    numbers = ("seconds", "kernel_seconds", "executed_flops", "bytes_accessed")
    figures = {name: line(getattr(small, name), getattr(large, name)) for name in numbers}
    small_top, top = {operation["name"]: operation for operation in small.top}, []
    for high in large.top:
        if low := small_top.get(high["name"]):
            seconds = max(line(low["seconds"], high["seconds"]), 0)
            executions = max(round(line(low["executions"], high["executions"])), 0)
            share = seconds / figures["seconds"]
            top.append({"name": high["name"], "seconds": seconds, "share": share, "executions": executions})
    return large._replace(**figures, top=sorted(top, key=lambda operation: -operation["seconds"]))
