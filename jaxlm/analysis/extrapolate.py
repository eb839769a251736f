"""Extrapolation of a train step from steps of few layers, which compile in minutes instead of an hour.

The layers of a stack are alike, so that memory, time and collectives of a step grow linearly with their number, but for
what the compiler decides with the whole program in view: where memory is short, it computes some values again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxlm.analysis.compilation import Step
from jaxlm.analysis.estimate import Estimate
from jaxlm.analysis.hlo import Traffic
from jaxlm.config.experiment import Experiment
from jaxlm.errors import UserError

DEPTHS = (2, 4)
"""Numbers of layers of the steps that are compiled: even, since GPT-3's layers alternate."""
STACKS = ("num_layers", "num_decoder_layers", "generator_num_layers")
"""Fields of a model with the number of layers of a stack."""


def with_layers(experiment: Experiment, layers: int) -> Experiment:
    """Return the experiment with `layers` layers in every stack of its model.

    Raises:
        UserError: The model has no stack of more than DEPTHS layers, or stacks of different depths.
    """
    model = experiment.objective.model
    depths = {name: depth for name in STACKS if (depth := getattr(model, name, None)) is not None}
    if len(set(depths.values())) != 1 or min(depths.values()) <= max(DEPTHS):
        found = ", ".join(f"{name} {depth}" for name, depth in depths.items()) or "no layers"
        raise UserError(
            f"only models whose stacks all have the same number of layers, more than {max(DEPTHS)}, can be "
            f"extrapolated; this {type(model).__name__} has {found}."
        )
    try:
        model = dataclasses.replace(model, **dict.fromkeys(depths, layers))
    except UserError as error:
        raise UserError(f"{type(model).__name__} cannot be extrapolated from {layers} layers: {error}") from error
    return dataclasses.replace(experiment, objective=dataclasses.replace(experiment.objective, model=model))


def can_extrapolate(experiment: Experiment) -> bool:
    """Return whether the steps of an experiment can be extrapolated from few layers."""
    try:
        with_layers(experiment, DEPTHS[0])
    except UserError:
        return False
    return True


def extrapolate(small: Step, large: Step, layers: int) -> Step:
    """Return the step with `layers` layers, on the line through the steps with DEPTHS layers.

    If one of them does not fit in HBM, neither does this one. Operations are those among the longest of both.
    """
    if not (small.fits and large.fits):
        return large if small.fits else small

    def line(low: float, high: float) -> float:
        return high + (high - low) * (layers - DEPTHS[1]) / (DEPTHS[1] - DEPTHS[0])

    def count(low: float, high: float) -> int:
        return max(round(line(low, high)), 0)

    by_kind = {kind: count(small.hbm_by_kind[kind], size) for kind, size in large.hbm_by_kind.items()}
    totals = {}
    for kind, high in large.collectives.items():
        pairs = list(zip(small.collectives.get(kind, Traffic()), high, strict=True))
        totals[kind] = Traffic(*(count(*pair) for pair in pairs[:4]), *(max(line(*pair), 0.0) for pair in pairs[4:]))
    return large._replace(
        hbm_by_kind=by_kind, used=sum(by_kind.values()), collectives=totals, seconds=small.seconds + large.seconds,
        estimate=small.estimate and large.estimate and _estimate(small.estimate, large.estimate, line),
    )


def _estimate(small: Estimate, large: Estimate, line: Callable[[float, float], float]) -> Estimate:
    numbers = ("seconds", "kernel_seconds", "executed_flops", "roofline_seconds", "bytes_accessed")
    figures = {name: line(getattr(small, name), getattr(large, name)) for name in numbers}
    before = {operation["name"]: operation for operation in small.top}
    top = []
    for operation in large.top:
        if low := before.get(operation["name"]):
            seconds = line(low["seconds"], operation["seconds"])
            executions = round(line(low["executions"], operation["executions"]))
            share = seconds / figures["seconds"]
            top.append({"name": operation["name"], "seconds": seconds, "share": share, "executions": executions})
    return large._replace(**figures, top=sorted(top, key=lambda operation: -operation["seconds"]))
