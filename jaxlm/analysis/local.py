"""Plan of a train step on the devices of this machine, beside the measured step."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import jax

from jaxlm.analysis.bench import bench_pretraining
from jaxlm.analysis.costs import hbm_bytes, product_flops
from jaxlm.analysis.hlo import traffic
from jaxlm.analysis.links import collective_timer
from jaxlm.analysis.plan import Plan
from jaxlm.analysis.step import CompiledStep, Estimate, batch_shapes, read_compiled
from jaxlm.parallel.mesh import make_mesh
from jaxlm.parallel.peaks import measured_bandwidth
from jaxlm.runs.session import Session
from jaxlm.types import Report


def plan_here(session: Session, hlo: Path | None = None, report: Report = print) -> Plan:
    """Compile a train step for the devices of this machine, predict its time, and measure it if it fits.

    The prediction is the time of the matrix products at the peak and of the memory traffic at the bandwidth, one after
    the other. Peak and bandwidth are the published ones if known; otherwise they are measured with a large matrix
    product and a large copy. FLOPs are those of the formula or of the compiled products, whichever are more.

    The text of the compiled module is written to `hlo`.
    """
    program, batch = session.program(make_mesh(session.experiment.mesh)), batch_shapes(session)
    device, devices = program.mesh.local_devices[0], program.mesh.size
    sharing = devices if device.platform == "cpu" else 1  # the devices of one CPU share its memory
    report("Compiling …")
    start = time.perf_counter()
    compiled = program.lower(batch).compile()
    seconds = time.perf_counter() - start
    module, by_kind = read_compiled(compiled, program, batch, hlo)
    moved = traffic(module, collective_timer(program.mesh.devices.flatten().tolist()))
    step = CompiledStep(by_kind, sum(by_kind.values()), None, moved, seconds)
    plan = Plan.of(session, program, step, _memory(device) // sharing)
    if not plan.fits:
        return plan
    timed = bench_pretraining(session, report=report)
    peak, bandwidth = timed["peak_flops_per_device"], plan.bandwidth_per_chip or measured_bandwidth(device) / sharing
    flops, accessed = max(plan.flops_per_step / devices, product_flops(module)), hbm_bytes(module)
    origin = "a measured" if timed["peak_is_measured"] else "the published"
    method = f"products at {origin} peak, then memory traffic at the bandwidth"
    bound = "memory" if accessed / bandwidth > flops / peak else "compute"
    estimate = Estimate(flops / peak + accessed / bandwidth, flops, accessed, method, bound=bound)
    return dataclasses.replace(
        plan, step=step._replace(estimate=estimate), peak_flops_per_chip=peak, bandwidth_per_chip=bandwidth,
        measured_step_seconds=timed["step_seconds"],
    )


def _memory(device: jax.Device) -> int:
    """Return the memory of a device in bytes; for a CPU that of the machine."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return limit or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
