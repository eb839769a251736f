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

from jaxlm.analysis.compilation import compile_step
from jaxlm.analysis.hlo import Traffic
from jaxlm.analysis.step import CompiledStep, Estimate, Kernels, Operation, batch_shapes, input_bytes
from jaxlm.errors import UserError
from jaxlm.runs.session import Session
from jaxlm.types import Report

STACKS = ("num_layers", "num_decoder_layers", "generator_num_layers")
"""Fields of a model with the number of layers of a stack."""


def compile_extrapolated(session: Session, mesh: Mesh, topology: str, report: Report = print) -> CompiledStep:
    """Compile steps of few layers (`Model.plan_depths`) and extrapolate to the session's own depth.

    If one of them does not fit in HBM, neither does the whole step, whose size is then at least that of its inputs.
    """
    steps: list[CompiledStep] = []
    batch, model = batch_shapes(session), session.objective.model
    for depth in model.plan_depths:
        report(f"A step of {depth} layers:")
        step = compile_step(with_layers(session, depth).program(mesh), batch, topology, report=report)
        if step.message:
            inputs = input_bytes(session.program(mesh), batch)
            return step._replace(hbm_by_kind=inputs, hbm_bytes=max(step.hbm_bytes, sum(inputs.values())))
        steps.append(step)
    return extrapolate(*steps, model.plan_depths, max(stack_depths(model).values()))


def with_layers(session: Session, layers: int) -> Session:
    """Return the session with `layers` layers in the deepest stack of its model, and the same share of the others."""
    model = session.objective.model
    depths, is_loop = stack_depths(model), getattr(model, "loop_layers", False)
    few, deepest = model.plan_depths, max(depths.values(), default=0)
    if is_loop or deepest <= max(few) or any(n * depth % deepest for n in few for depth in depths.values()):
        found = ", ".join(f"{name} {depth}" for name, depth in depths.items()) or "no layers"
        raise UserError(
            f"--extrapolate is for models of more than {max(few)} layers, not in a loop, as many or half as many in "
            f"every stack; this {type(model).__name__} has {found}{' in a loop' if is_loop else ''}. Leave it out."
        )
    try:
        model = dataclasses.replace(model, **{name: layers * depth // deepest for name, depth in depths.items()})
    except UserError as error:
        raise UserError(
            f"--extrapolate needs {layers} layers in every stack, which {type(model).__name__} cannot have; leave it "
            "out."
        ) from error
    return session.replace(objective=dataclasses.replace(session.objective, model=model))


def stack_depths(model: Any) -> dict[str, int]:
    """Return the fields with the number of layers of each stack of a model, and their values."""
    return {name: depth for name in STACKS if (depth := getattr(model, name, None)) is not None}


def extrapolate(small: CompiledStep, large: CompiledStep, depths: tuple[int, int], layers: int) -> CompiledStep:
    """Extrapolate steps of `depths` layers, which fit in HBM, linearly to `layers` layers."""
    if large.hbm_bytes < small.hbm_bytes:
        raise UserError(
            f"--extrapolate finds that {depths[1]} layers need less memory than {depths[0]}, since the compiler "
            f"recomputes more where memory is short; only the whole step tells what {layers} layers need. Leave it out."
        )

    def line(low: float, high: float) -> float:
        return high + (high - low) * (layers - depths[1]) / (depths[1] - depths[0])

    by_kind = {kind: round(line(small.hbm_by_kind[kind], size)) for kind, size in large.hbm_by_kind.items()}
    return large._replace(
        hbm_by_kind=by_kind, hbm_bytes=sum(by_kind.values()),
        collectives={
            kind: _traffic(*map(line, small.collectives.get(kind, Traffic()), item))
            for kind, item in large.collectives.items()
        },
        estimate=small.estimate and large.estimate and _estimate(small.estimate, large.estimate, line),
        compile_seconds=small.compile_seconds + large.compile_seconds,
        kernels={name: round(line(small.kernels.get(name, 0), times)) for name, times in large.kernels.items()},
    )


def _traffic(
    count: float, size: float, hidden_count: float, hidden_size: float, seconds: float, hidden_seconds: float
) -> Traffic:
    """Return extrapolated figures, of which no less than nothing and no more than all overlap with compute."""
    hidden_count, hidden_size, hidden_seconds = (max(one, 0) for one in (hidden_count, hidden_size, hidden_seconds))
    return Traffic(
        round(max(count, hidden_count)), round(max(size, hidden_size)), round(hidden_count), round(hidden_size),
        max(seconds, hidden_seconds), hidden_seconds,
    )


def _estimate(small: Estimate, large: Estimate, line: Callable[[float, float], float]) -> Estimate:
    """Extrapolate the time, and the operations that both steps have."""
    seconds, flops, size = map(line, small[:3], large[:3])
    return large._replace(
        seconds=seconds, executed_flops=flops, bytes_accessed=size,
        kernels=large.kernels and Kernels(line(small.kernels.seconds, large.kernels.seconds), *large.kernels[1:]),
        operations={
            name: Operation(*(max(figure, 0.0) for figure in map(line, small.operations[name], operation)))
            for name, operation in large.operations.items() if name in small.operations
        },
    )
