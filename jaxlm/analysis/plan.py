"""Plan of a train step: memory, FLOPs, collectives and time of the compiled step, on a TPU topology or here."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any, Self

from jaxlm.analysis.compilation import compile_step, hbm_limit, topology_devices
from jaxlm.analysis.extrapolate import compile_extrapolated
from jaxlm.analysis.hlo import asynchronous_share
from jaxlm.analysis.links import Prediction, predict
from jaxlm.analysis.step import CompiledStep, batch_shapes, describe_vocabulary
from jaxlm.parallel.mesh import make_mesh
from jaxlm.parallel.peaks import memory_bandwidth, peak_flops
from jaxlm.runs.session import Session
from jaxlm.training.program import Program
from jaxlm.types import Report

TOP = 10
"""Number of operations in a report."""
DAY = 86400


@dataclasses.dataclass(frozen=True)
class Plan:
    """Plan of a train step. README.md in this folder says how its figures are made.

    Attributes:
        topology: Name of the topology; None for the devices here.
        devices: Number of devices; a chip is one device, as jax counts them.
        device_kind: Their kind.
        mesh: Sizes of the mesh axes.
        batch_size: Rows of a batch.
        length: Tokens of a row.
        steps: Steps of the run, if it says how many.
        vocabulary: Size and origin of the vocabulary.
        parameters: Number of parameters.
        flops_per_step: FLOPs by the objective's formula.
        peak_flops_per_chip: Peak FLOP/s; 0 if unknown.
        bandwidth_per_chip: Memory bandwidth in bytes/s; 0 if unknown.
        hbm_limit_bytes: Memory of a chip.
        step: The compiled step.
        is_extrapolated: Whether the step is extrapolated from few layers.
        measured_step_seconds: Measured time of a step, on the devices here.
        changes: Flags that differ from the session, in a search.
        price: Price of a chip for an hour.
    """

    topology: str | None
    devices: int
    device_kind: str
    mesh: dict[str, int]
    batch_size: int
    length: int
    steps: int | None
    vocabulary: str
    parameters: int
    flops_per_step: float
    peak_flops_per_chip: float
    bandwidth_per_chip: float
    hbm_limit_bytes: int
    step: CompiledStep
    is_extrapolated: bool = False
    measured_step_seconds: float | None = None
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    price: float = 0.0

    @classmethod
    def of(cls, session: Session, program: Program, step: CompiledStep, hbm_limit_bytes: int) -> Self:
        """Return the plan of a session's compiled step, without a topology's name."""
        mesh, t, length = program.mesh, session.experiment.train, session.experiment.data.length
        device = mesh.devices.flat[0]
        return cls(
            topology=None, devices=mesh.size, device_kind=device.device_kind, mesh=dict(mesh.shape),
            batch_size=t.batch_size, length=length, steps=t.steps, vocabulary=describe_vocabulary(session),
            parameters=program.num_params, flops_per_step=program.step_flops(length, t.batch_size),
            peak_flops_per_chip=peak_flops(device), bandwidth_per_chip=memory_bandwidth(device),
            hbm_limit_bytes=hbm_limit_bytes, step=step,
        )

    @property
    def fits(self) -> bool:
        """Whether the step fits in memory."""
        return not self.step.message and self.step.hbm_bytes <= self.hbm_limit_bytes

    @functools.cached_property
    def prediction(self) -> Prediction | None:
        """Time with collectives; None if it is not known."""
        e = self.step.estimate
        return e and predict(e.seconds, self.step.collectives, e.bound)

    @property
    def seconds(self) -> float | None:
        """Time of a step: measured, or predicted, or None."""
        return self.measured_step_seconds or (self.prediction and self.prediction.seconds)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens a second, padding included."""
        return self.seconds and self.batch_size * self.length / self.seconds

    @property
    def days(self) -> float | None:
        """Time of all steps in days."""
        return self.seconds and self.steps and self.steps * self.seconds / DAY

    @property
    def chip_hours(self) -> float | None:
        """Time of all steps in hours of a chip."""
        cores = 2 if self.device_kind.startswith(("TPU v2", "TPU v3", "TPU7x")) else 1  # of a chip, each a device
        return self.days and 24 * self.devices / cores * self.days

    @property
    def roofline_seconds(self) -> float | None:
        """Time by the roofline: on GPUs of each operation, else of the formula's FLOPs and all memory traffic."""
        e, flops = self.step.estimate, self.flops_per_step / self.devices
        if e and e.is_roofline:
            return e.seconds
        return e and max(flops / self.peak_flops_per_chip, e.bytes_accessed / self.bandwidth_per_chip)

    def mfu(self, seconds: float, flops: float | None = None) -> float | None:
        """Return the share of the peak that a chip reaches with some FLOPs, by default the formula's, in this time.

        None where the formula does not count them, as of frozen parameters.
        """
        flops = self.flops_per_step / self.devices if flops is None else flops
        return flops / seconds / self.peak_flops_per_chip if flops else None

    def top_operations(self) -> list[dict[str, Any]]:
        """Return the operations that take longest: name, seconds a step, share of its time, and executions."""
        e = self.step.estimate
        longest = sorted(e.operations.items(), key=lambda item: -item[1].seconds)[:TOP] if e else []
        return [
            {"name": name, "seconds": seconds, "share": seconds / e.seconds, "executions": round(executions)}
            for name, (seconds, executions) in longest
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the object that `jaxlm plan --json` prints."""
        step, e, p, measured = self.step, self.step.estimate, self.prediction, self.measured_step_seconds
        estimated = e.seconds if e and e.kernels else None  # by a TPU's cycles
        facts = {name: value for name, value in vars(self).items() if name in _FACTS}
        return facts | {
            "fits": self.fits, "hbm_bytes_per_chip": step.hbm_bytes, "hbm_by_kind": step.hbm_by_kind,
            "headroom_bytes": max(self.hbm_limit_bytes - step.hbm_bytes, 0),
            "bytes_over": max(step.hbm_bytes - self.hbm_limit_bytes, 0),
            "flops_per_step_per_chip": self.flops_per_step / self.devices,
            "estimated_step_seconds": estimated, "estimated_mfu": estimated and self.mfu(estimated),
            "executed_flops_per_chip": e and e.executed_flops,
            "estimated_executed_mfu": estimated and self.mfu(estimated, e.executed_flops),
            "predicted_step_seconds": p and p.seconds, "predicted_mfu": p and self.mfu(p.seconds),
            "predicted_bound": p and p.bound, "exposed_collective_seconds": p and p.collective_seconds,
            "tokens_per_day": self.seconds and DAY * self.tokens_per_second, "days": self.days,
            "chip_hours": self.chip_hours, "cost": self.price * self.chip_hours if self.price and self.days else None,
            "kernels": dict(step.kernels), "estimated_kernel_seconds": e and e.kernels and e.kernels.seconds,
            "counted_kernels": e and e.kernels and e.kernels.counted,
            "charged_kernels": e and e.kernels and e.kernels.charged,
            "roofline_seconds": self.roofline_seconds, "bytes_accessed_per_chip": e and e.bytes_accessed,
            "top_operations": self.top_operations(),
            "collectives": {kind: item._asdict() for kind, item in step.collectives.items()},
            "asynchronous_share": asynchronous_share(step.collectives),
            "compile_seconds": step.compile_seconds, "compiler_message": step.message or None,
            "measured_mfu": measured and self.mfu(measured), "relative_error": measured and p.seconds / measured - 1,
        }


_FACTS = {field.name for field in dataclasses.fields(Plan)} - {"step", "price"}
"""Fields that are JSON keys of the same name."""


def plan(
    session: Session, topology: str, hlo: Path | None = None, extrapolate: bool = False, report: Report = print
) -> Plan:
    """Compile a train step for a topology and return its plan.

    For a step that the compiler refuses for its size, the memory is from the compiler's message, that by kind has only
    the step's inputs, and there is no estimate.

    The text of the compiled module is written to `hlo`, but for a step that is extrapolated (extrapolate.py).
    """
    devices = topology_devices(topology)
    mesh = make_mesh(session.experiment.mesh, devices)
    limit, program = hbm_limit(devices[0]), session.program(mesh)
    if extrapolate:
        step = compile_extrapolated(session, mesh, topology, report)
    else:
        step = compile_step(program, batch_shapes(session), topology, hlo, report)
    found = Plan.of(session, program, step, limit)
    return dataclasses.replace(found, topology=topology, is_extrapolated=extrapolate)
