"""Plan of a train step on the devices of this machine, beside the measured step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax

from jaxlm.analysis.bench import bench_pretraining
from jaxlm.analysis.costs import hbm_bytes, product_flops
from jaxlm.analysis.hlo import parse, traffic
from jaxlm.analysis.step import batch_shapes, describe_vocabulary, input_bytes, memory_by_kind
from jaxlm.parallel.mesh import make_mesh
from jaxlm.parallel.peaks import measured_bandwidth, tpu_generation
from jaxlm.runs.session import Session
from jaxlm.types import Report


def plan_here(
    session: Session, hlo: Path | None = None, report: Report = print
) -> dict[str, Any]:
    """Compile a train step for the devices of this machine, predict its time, and measure it if it fits.

    The prediction is the time of the matrix products at the peak and of the memory traffic at the bandwidth, one after
    the other. Peak and bandwidth are the published ones if known; otherwise they are measured with a
    large matrix product and a large copy. FLOPs are those of the formula or of the compiled products, whichever are
    more.

    Args:
        session: The preset or run.
        hlo: File for the text of the compiled module.
        report: Receives progress messages.

    Returns:
        The object that `jaxlm plan --json` prints without --topology. `relative_error` is that of the prediction.
    """
    experiment = session.experiment
    mesh, t, length = make_mesh(experiment.mesh), experiment.train, experiment.data.length
    device = mesh.devices.flat[0]
    program, batch = session.program(mesh), batch_shapes(session)
    report("Compiling …")
    compiled = program.lower(batch).compile()
    text = compiled.as_text()
    if hlo is not None:
        hlo.write_text(text)
    module, by_kind = parse(text), memory_by_kind(compiled.memory_analysis(), input_bytes(program, batch))
    used, limit = sum(by_kind.values()), _memory(device) // (mesh.size if device.platform == "cpu" else 1)
    formula, accessed = program.step_flops(length, t.batch_size), hbm_bytes(module)
    flops = max(formula / mesh.size, product_flops(module))
    found = {
        "topology": None, "devices": mesh.size, "device_kind": device.device_kind, "mesh": dict(mesh.shape),
        "batch_size": t.batch_size, "length": length,
        "vocabulary": describe_vocabulary(session),
        "parameters": program.num_params, "fits": used <= limit, "hbm_bytes_per_chip": used, "hbm_limit_bytes": limit,
        "hbm_by_kind": by_kind, "flops_per_step": formula, "executed_flops_per_chip": flops,
        "bytes_accessed_per_chip": accessed,
        "collectives": {kind: item._asdict() for kind, item in traffic(module).items()},
    }
    if used > limit:
        return found | dict.fromkeys(("predicted_step_seconds", "measured_step_seconds", "relative_error"))
    chip = tpu_generation(device)
    bandwidth = chip.hbm_bandwidth if chip else measured_bandwidth(device)
    bandwidth /= mesh.size if device.platform == "cpu" else 1  # the devices of one CPU share its memory
    measured = bench_pretraining(session, report=report)
    peak, seconds = measured["peak_flops_per_device"], measured["step_seconds"]
    predicted = flops / peak + accessed / bandwidth
    return found | {
        "peak_flops_per_chip": peak, "peak_is_measured": measured["peak_is_measured"], "bandwidth_per_chip": bandwidth,
        "bandwidth_is_measured": chip is None, "predicted_step_seconds": predicted, "measured_step_seconds": seconds,
        "measured_mfu": measured["mfu"], "relative_error": predicted / seconds - 1,
        "tokens_per_day": 86400 * t.batch_size * length / seconds, "steps": t.steps,
        "days": t.steps and t.steps * seconds / 86400,
    }


def _memory(device: jax.Device) -> int:
    """Return the memory of a device in bytes; for a CPU that of the machine."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return limit or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
