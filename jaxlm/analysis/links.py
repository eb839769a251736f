"""Time of collectives over the links of a TPU slice, or of GPUs, by published bandwidths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxlm.analysis.hlo import BETWEEN_SLICES, Collective, Traffic
from jaxlm.parallel.peaks import GPU, gpu_model, tpu_generation

WRAPPING_SIDE = 16
"""Chips along an axis at which a flat slice (v5e, v6e) closes to a ring; one of cubes does at multiples of 4."""


class Prediction(NamedTuple):
    """Time of a step with its collectives.

    Attributes:
        seconds: Step time: compute plus exposed collectives.
        collective_seconds: Part of `seconds` that is not compute.
        bound: Bottleneck: "compute", "memory", "links" or "network between slices".
    """

    seconds: float
    collective_seconds: float
    bound: str


def collective_timer(devices: Sequence[Any]) -> Callable[[Collective], float]:
    """Return the function that estimates the time of one execution of a collective in seconds.

    A group of n chips lies along some axes of the torus. The links along these axes move its data in both directions
    at once if the axis closes to a ring, else in one. An all-gather or reduce-scatter of V bytes takes V (n - 1) / n
    over their bandwidth, an all-reduce twice as long. In an all-to-all a byte passes a quarter of each axis on average,
    and the slowest axis decides. A permutation takes one link in one direction. Latencies, and traffic of other groups,
    are left out.

    The TPU compiler divides a collective over several slices into one inside each slice and a transfer between them.
    For a transfer of B bytes per chip between s slices, a chip sends B (s - 1) / s in a reduce-scatter or all-to-all,
    2 B (s - 1) / s in an all-reduce, B (s - 1) in an all-gather and B in a permutation. A collective that the compiler
    has not divided takes the sum of both parts.

    `devices` are in the order of the program's partition ids, slice by slice.
    """
    if gpu := gpu_model(devices[0]):
        return _gpu_timer(devices, gpu)
    chip = tpu_generation(devices[0])
    if chip is None or not chip.link_bandwidth:
        return lambda collective: 0.0
    slice_size = sum(_slice(device) == _slice(devices[0]) for device in devices)
    coordinates = [tuple(d.coords) for d in devices]
    sides = [len(set(axis)) for axis in zip(*coordinates[:slice_size], strict=True)]

    def between(kind: str, size: float, slices: int) -> float:
        copies = {
            "all-reduce": 2 * (slices - 1) / slices, "all-gather": slices - 1, "collective-permute": 1, "one-to-one": 1
        }.get(kind, (slices - 1) / slices)
        return copies * size / chip.slice_bandwidth if chip.slice_bandwidth else 0.0

    def within(kind: str, size: float, group: Sequence[int]) -> float:
        spans = [len(set(axis)) for axis in zip(*(coordinates[i] for i in group), strict=True)]
        axes = [
            (span, chip.link_bandwidth * (2 if span == side and _wraps(sides, side) else 1))
            for span, side in zip(spans, sides, strict=True) if span > 1
        ]
        if not axes:  # the chip's own cores
            return 0.0
        if kind == "collective-permute":
            return size / chip.link_bandwidth
        if kind == "all-to-all":
            return max(size * span / 4 / bandwidth for span, bandwidth in axes)
        passes = 2 if kind == "all-reduce" else 1
        return passes * size * (1 - 1 / len(group)) / sum(bandwidth for _, bandwidth in axes)

    def seconds(collective: Collective) -> float:
        kind, size, group = collective.kind, collective.bytes, collective.group or range(slice_size)
        if kind.endswith(BETWEEN_SLICES):
            return between(kind.removesuffix(BETWEEN_SLICES), size, len(devices) // slice_size)
        local = [i for i in group if _slice(devices[i]) == _slice(devices[group[0]])]
        slices = len({_slice(devices[i]) for i in group})
        given = {"all-gather": size / len(group), "all-to-all": size, "collective-permute": size}
        crossing = between(kind, given.get(kind, size / len(local)), slices) if slices > 1 else 0.0
        return within(kind, size, local) + crossing

    return seconds


def _gpu_timer(devices: Sequence[Any], gpu: GPU) -> Callable[[Collective], float]:
    """Return the same function for GPUs: NVLink joins those of a host, and each has its share of the hosts' network.

    Rings pass through all GPUs of a group, so that a collective of V bytes runs at the lower of a GPU's link and the
    network of the group's GPUs on one host. In an all-to-all each GPU sends what leaves its host over its own share.
    """

    def seconds(collective: Collective) -> float:
        group = collective.group or range(len(devices))
        size, n = collective.bytes, len(group)
        here = sum(devices[i].process_index == devices[group[0]].process_index for i in group)
        network = here * gpu.network_bandwidth if here < n else gpu.link_bandwidth
        if n == 1 or not network:
            return 0.0
        if collective.kind == "collective-permute":
            return size / min(network, gpu.link_bandwidth)
        if collective.kind == "all-to-all":
            return size / n * max((here - 1) / gpu.link_bandwidth, (n - here) * here / network)
        passes = 2 if collective.kind == "all-reduce" else 1
        return passes * size * (1 - 1 / n) / min(network, gpu.link_bandwidth)

    return seconds


def _slice(device: Any) -> int:
    return getattr(device, "slice_index", 0)


def _wraps(sides: Sequence[int], side: int) -> bool:
    """Return whether an axis of a slice with these sides closes to a ring."""
    is_flat = min(sides) == 1
    return side == WRAPPING_SIDE if is_flat else all(other % 4 == 0 for other in sides)


def predict(compute_seconds: float, totals: dict[str, Traffic], bound: str = "compute") -> Prediction:
    """Return the time of a step from the time of its compute, with what bounds that, and the totals of collectives."""
    waiting = sum(item.seconds - item.asynchronous_seconds for item in totals.values())
    hidden = sum(item.asynchronous_seconds for item in totals.values())
    exposed = waiting + max(0.0, hidden - compute_seconds)
    between = sum(item.seconds for kind, item in totals.items() if kind.endswith(BETWEEN_SLICES))
    times = {bound: compute_seconds, "links": waiting + hidden - between, "network between slices": between}
    return Prediction(compute_seconds + exposed, exposed, max(times, key=times.__getitem__))
