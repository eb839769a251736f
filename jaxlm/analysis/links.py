"""Time of collectives over the links of a TPU slice, by published bandwidths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxlm.analysis.hlo import BETWEEN_SLICES, Collective, Traffic
from jaxlm.parallel.peaks import tpu_generation

WRAPPING_SIDE = 16
"""Chips along an axis at which a flat slice (v5e, v6e) closes to a ring; one of cubes does at multiples of 4."""


class Prediction(NamedTuple):
    """Time of a step with its collectives.

    Attributes:
        seconds: Compute, the collectives that do not overlap with it, and what the others take longer than compute.
        collective_seconds: Part of `seconds` that is not compute.
        bound: What takes most of the step: "compute", "links" or "network between slices".
    """

    seconds: float
    collective_seconds: float
    bound: str


def collective_timer(devices: Sequence[Any]) -> Callable[[Collective], float]:
    """Return the function that estimates the time of one execution of a collective in seconds.

    A group of n chips lies along some axes of the torus. The links along these axes move its data in both directions
    at once if the axis closes to a ring, else in one. An all-gather or reduce-scatter of V bytes takes V (n - 1) / n
    over their bandwidth, an all-reduce twice as long. In an all-to-all a byte passes a quarter of each axis on average,
    and the slowest axis decides. A permutation takes one link in one direction. Between n slices a chip sends
    2 (n - 1) / n of the bytes in an all-reduce, and n - 1 copies of its bytes otherwise. Latencies, and traffic of
    other groups, are left out.

    Args:
        devices: Devices in the order of the program's partition ids.
    """
    chip = tpu_generation(devices[0])
    if chip is None or not chip.link_bandwidth:
        return lambda collective: 0.0
    first_slice = [d for d in devices if getattr(d, "slice_index", 0) == getattr(devices[0], "slice_index", 0)]
    coordinates = [tuple(d.coords) for d in first_slice]
    sides = [len(set(axis)) for axis in zip(*coordinates, strict=True)]
    slices = len(devices) // len(first_slice)

    def seconds(collective: Collective) -> float:
        if collective.kind.endswith(BETWEEN_SLICES):
            times = 2 * (slices - 1) / slices if collective.kind.startswith("all-reduce") else slices - 1
            return times * collective.bytes / chip.slice_bandwidth if chip.slice_bandwidth else 0.0
        group = [coordinates[i] for i in collective.group or range(len(coordinates))]
        spans = [len(set(axis)) for axis in zip(*group, strict=True)]
        axes = [
            (span, chip.link_bandwidth * (2 if span == side and _wraps(sides, side) else 1))
            for span, side in zip(spans, sides, strict=True) if span > 1
        ]
        if not axes:  # the chip's own cores
            return 0.0
        if collective.kind == "collective-permute":
            return collective.bytes / chip.link_bandwidth
        if collective.kind == "all-to-all":
            return max(collective.bytes * span / 4 / bandwidth for span, bandwidth in axes)
        passes = 2 if collective.kind == "all-reduce" else 1
        return passes * collective.bytes * (1 - 1 / len(group)) / sum(bandwidth for _, bandwidth in axes)

    return seconds


def _wraps(sides: Sequence[int], side: int) -> bool:
    """Return whether an axis of a slice with these sides closes to a ring."""
    is_flat = min(sides) == 1
    return side == WRAPPING_SIDE if is_flat else all(other % 4 == 0 for other in sides)


def predict(compute_seconds: float, totals: dict[str, Traffic]) -> Prediction:
    """Return the time of a step from the time of its compute and the totals of its collectives."""
    waiting = sum(item.seconds - item.asynchronous_seconds for item in totals.values())
    hidden = sum(item.asynchronous_seconds for item in totals.values())
    exposed = waiting + max(0.0, hidden - compute_seconds)
    between = sum(item.seconds for kind, item in totals.items() if kind.endswith(BETWEEN_SLICES))
    times = {"compute": compute_seconds, "links": waiting + hidden - between, "network between slices": between}
    return Prediction(compute_seconds + exposed, exposed, max(times, key=times.__getitem__))
