"""Search for the fastest mesh of a train step on a TPU topology that fits in HBM."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from jaxlm.analysis.compilation import topology_devices
from jaxlm.analysis.plan import Plan, plan
from jaxlm.errors import UserError
from jaxlm.fields import with_value
from jaxlm.parallel.mesh import MeshConfig, num_slices
from jaxlm.runs.session import Session
from jaxlm.types import Report

FSDP_SIZES = (1, 4, 16, 64, 256, 1024)
"""Sizes of the axis `fsdp` that are tried."""
TENSOR_SIZES = (1, 2, 4, 8)
"""Sizes of the axis `tensor`; see `search` for when the next one is tried."""


def search(session: Session, topology: str, extrapolate: bool = False, report: Report = print) -> Iterator[Plan]:
    """Yield the plans of a step over several meshes, with the flags that differ from the session.

    For each size of `fsdp`, also all devices of a host, with `data` for the rest, the step is planned as it is; where
    it does not fit, with at least twice the microbatches, or chunks, until they have one row a chip, then with all
    activations recomputed. The next size of `tensor` is tried where nothing has fitted yet, and where links bind the
    fastest plan and that has the last size. Several slices divide `data`, so that `fsdp` and `tensor` fill one at most.
    """
    devices = topology_devices(topology)
    chips = len(devices) // num_slices(devices)  # of one slice
    host = sum(device.process_index == devices[0].process_index for device in devices)
    plans: list[Plan] = []
    for tensor in TENSOR_SIZES:
        best = fastest(plans)
        is_bound = best and best.prediction and best.prediction.bound == "links"
        if any(one.fits for one in plans) and not (is_bound and best.changes["mesh.tensor"] == tensor // 2):
            break
        for fsdp in sorted({size for size in (*FSDP_SIZES, host // tensor, chips // tensor)
                            if size and not chips % (size * tensor)}):
            for changed, changes in variants(session, MeshConfig(-1, fsdp, tensor), len(devices)):
                try:
                    found = plan(changed, topology, extrapolate=extrapolate, report=report)
                except UserError as error:
                    refused = error
                    report(f"The mesh {len(devices) // fsdp // tensor} x {fsdp} x {tensor}: {error}")
                    break
                plans.append(dataclasses.replace(found, changes=changes))
                yield plans[-1]
                if found.fits:
                    break
    if not plans:
        raise refused


def variants(session: Session, mesh: MeshConfig, devices: int) -> Iterator[tuple[Session, dict[str, Any]]]:
    """Yield the session over a mesh, then variants that take less memory and more time, each with its flags."""
    flags = {"mesh.data": mesh.data, "mesh.fsdp": mesh.fsdp, "mesh.tensor": mesh.tensor}
    session = session.replace(mesh=mesh)
    yield session, flags
    t, shards = session.experiment.train, devices // mesh.tensor
    objective, name, parts = session.objective, "train.accumulate", t.accumulate
    if not objective.is_separable:
        name, parts = "objective.chunks", objective.chunks
    rows = 0 if t.batch_size % shards else t.batch_size // shards
    found = [(session, flags)]
    while parts := next((n for n in range(2 * parts, rows + 1) if rows % n == 0), 0):
        experiment = with_value(session.experiment, name, parts)
        found.append((dataclasses.replace(session, experiment=experiment), flags | {name: parts}))
        yield found[-1]
    if getattr(objective.model, "remat", "full") == "full":
        return
    for each, own in (found[0], *found[1:][-1:]):  # alone, and with the most microbatches
        try:
            model = each.objective.model.with_execution(remat="full")
        except UserError:  # a reversible model always recomputes
            return
        objective = dataclasses.replace(each.objective, model=model)
        yield each.replace(objective=objective), own | {"objective.model.remat": "full"}


def fastest(plans: Sequence[Plan]) -> Plan | None:
    """Return the plan with the shortest predicted step among those that fit."""
    return min((one for one in plans if one.fits and one.seconds), key=lambda one: one.seconds, default=None)
