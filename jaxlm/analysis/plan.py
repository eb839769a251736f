"""Plan of a train step on a TPU topology: memory, FLOPs, collectives and the predicted time of the compiled step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxlm.analysis.compilation import compile_step, hbm_limit, topology_devices
from jaxlm.analysis.estimate import KERNEL_PEAK_SHARE
from jaxlm.analysis.extrapolate import compile_extrapolated
from jaxlm.analysis.hlo import asynchronous_share
from jaxlm.analysis.links import predict
from jaxlm.analysis.step import batch_shapes, describe_vocabulary
from jaxlm.parallel.mesh import make_mesh
from jaxlm.parallel.peaks import peak_flops, tpu_generation
from jaxlm.runs.session import Session
from jaxlm.types import Report


def plan(
    session: Session, topology: str, hlo: Path | None = None, is_extrapolated: bool = False, report: Report = print
) -> dict[str, Any]:
    """Compile a train step for a topology and return its memory, FLOPs, collectives and estimated time.

    Args:
        session: The preset or run.
        topology: Name of a topology, such as "v5e:16x16".
        hlo: File for the text of the compiled module; not of an extrapolated step.
        is_extrapolated: Whether to compile steps of few layers instead, and extrapolate (extrapolate.py).
        report: Receives progress messages.

    Returns:
        The object that `jaxlm plan --json` prints. A chip is one device, as jax counts them. For a step that the
        compiler refuses for its size, `fits` is False, `hbm_bytes_per_chip` is from the compiler's message,
        `hbm_by_kind` has only the step's inputs, and there is no estimate.

    Raises:
        UserError: Topology, mesh or batch size are impossible, the compiler refuses the step otherwise, or it cannot be
            extrapolated.
    """
    experiment = session.experiment
    devices, t, length = topology_devices(topology), experiment.train, experiment.data.length
    mesh, limit, peak = make_mesh(experiment.mesh, devices), hbm_limit(devices[0]), peak_flops(devices[0])
    program, batch = session.program(mesh), batch_shapes(session)
    flops = program.step_flops(length, t.batch_size)
    if is_extrapolated:
        step = compile_extrapolated(session, mesh, topology, report)
    else:
        step = compile_step(program, batch, topology, hlo, report)
    used, e, totals = step.hbm_bytes, step.estimate, step.collectives
    predicted = e and predict(e.seconds, totals)
    tokens_per_second = predicted and t.batch_size * length / predicted.seconds
    return {
        "topology": topology, "devices": len(devices), "device_kind": devices[0].device_kind, "mesh": dict(mesh.shape),
        "batch_size": t.batch_size, "length": length,
        "vocabulary": describe_vocabulary(session),
        "parameters": program.num_params, "is_extrapolated": is_extrapolated,
        "fits": step.fits and used <= limit, "hbm_bytes_per_chip": used, "hbm_limit_bytes": limit,
        "headroom_bytes": max(limit - used, 0), "bytes_over": max(used - limit, 0), "hbm_by_kind": step.hbm_by_kind,
        "flops_per_step": flops, "flops_per_step_per_chip": flops / len(devices), "peak_flops_per_chip": peak,
        "estimated_step_seconds": e and e.seconds, "estimated_mfu": e and flops / len(devices) / e.seconds / peak,
        "executed_flops_per_chip": e and e.executed_flops,
        "estimated_executed_mfu": e and e.executed_flops / e.seconds / peak,
        "estimated_tokens_per_second": e and t.batch_size * length / e.seconds,
        "predicted_step_seconds": predicted and predicted.seconds,
        "predicted_mfu": predicted and flops / len(devices) / predicted.seconds / peak,
        "predicted_bound": predicted and predicted.bound,
        "exposed_collective_seconds": predicted and predicted.collective_seconds,
        "tokens_per_day": tokens_per_second and 86400 * tokens_per_second,
        "steps": t.steps, "days": predicted and t.steps and t.steps * predicted.seconds / 86400,
        "chip_hours": predicted and t.steps and len(devices) * t.steps * predicted.seconds / 3600,
        "estimated_kernel_seconds": e and e.kernel_seconds, "counted_kernels": e and e.counted_kernels,
        "charged_kernels": e and e.charged_kernels, "kernel_peak_share": KERNEL_PEAK_SHARE,
        "roofline_seconds": e and max(
            flops / len(devices) / peak, e.bytes_accessed / tpu_generation(devices[0]).hbm_bandwidth
        ),
        "bytes_accessed_per_chip": e and e.bytes_accessed,
        "top_operations": e.top if e else [],
        "collectives": {kind: item._asdict() for kind, item in totals.items()},
        "asynchronous_share": asynchronous_share(totals),
        "compile_seconds": step.compile_seconds, "compiler_message": step.message or None,
    }
