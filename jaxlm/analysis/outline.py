"""Analytic estimate of a train step's memory and time on a mesh, without compilation.

It orders the meshes of a large topology, so that only the best need be compiled.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from jaxlm.analysis.compilation import hbm_limit, topology_devices
from jaxlm.analysis.hlo import BETWEEN_SLICES, Collective
from jaxlm.analysis.links import collective_timer
from jaxlm.analysis.step import batch_shapes, input_bytes
from jaxlm.errors import UserError
from jaxlm.parallel.compiler import OVERLAP_OPTIONS, compiler_options
from jaxlm.parallel.mesh import MeshConfig, make_mesh, num_slices
from jaxlm.parallel.peaks import peak_flops, tpu_generation
from jaxlm.runs.session import Session
from jaxlm.training.program import Program

PEAK_SHARE = 0.5
"""Assumed share of the peak that the formula's FLOPs reach."""
STATE_PASSES = 2.5
"""HBM traffic of an update, gradients included, in units of the bytes of parameters and optimizer state."""
ACTIVATION_BYTES = 34
"""Bytes of activations for a token, a layer and a unit of its width (Korthikanti et al. 2022, without the scores)."""
EXPOSED_SHARE = 0.1
"""Share of collective time that stays exposed with the overlap compiler options."""
FILLED = 0.95
"""Share of HBM that an outlined step may take."""
TENSOR_SIZES = (1, 2, 4, 8)


class Outline(NamedTuple):
    """Outlined step on one mesh.

    Attributes:
        has_short_rows: Whether the matrix rows per chip are not a multiple of 8, the height of a tile.
        seconds: Time of a step.
        exposed_seconds: Part of `seconds` that is not compute.
        bound: Bottleneck, as in `jaxlm.analysis.links.Prediction`.
        hbm_bytes: HBM of a chip.
        flops: The formula's FLOPs of a step.
        num_params: Number of parameters.
        mesh: The mesh.
        accumulate: Number of microbatches.
    """

    has_short_rows: bool
    seconds: float
    exposed_seconds: float
    bound: str
    hbm_bytes: float
    flops: float
    num_params: int
    mesh: MeshConfig
    accumulate: int


def outlines(session: Session, topology: str) -> list[Outline]:
    """Return the outlined steps of the meshes of a topology on which the step seems to fit, best first.

    `tensor` above 1 is tried where nothing else seems to fit, and microbatches where the activations of one do not.

    Raises:
        UserError: The topology does not exist, or its clock is not known.
    """
    experiment, objective, found = session.experiment, session.objective, []
    devices, t, length = topology_devices(topology), experiment.train, experiment.data.length
    if tpu_generation(devices[0]) is None:
        raise UserError(f"the clock of {devices[0].device_kind} is not known, so that {topology} cannot be outlined.")
    chips = len(devices) // num_slices(devices)  # of one slice
    limit = hbm_limit(devices[0])
    batch = batch_shapes(session)
    for tensor in TENSOR_SIZES:
        for fsdp in (2**i for i in range(chips.bit_length()) if not chips % (2**i * tensor)):
            config = MeshConfig(-1, fsdp, tensor)
            mesh = make_mesh(config, devices)
            for accumulate in (t.accumulate * 2**i for i in range(8)):
                if t.batch_size % (accumulate * objective.row_group * len(devices) // tensor):
                    break
                train = dataclasses.replace(t, accumulate=accumulate)
                outline = _outline(session.replace(train=train).program(mesh), batch, length)
                if outline.hbm_bytes < FILLED * limit:
                    found.append(outline._replace(mesh=config))
                    break
        if found:
            break
    return sorted(found, key=lambda outline: outline[:2])


def _outline(program: Program, batch: Any, length: int) -> Outline:
    """Return the outline of a step.

    The memory leaves out logits and buffers of collectives. FLOPs take their time at PEAK_SHARE of the peak, four
    thirds of it with `remat full`, and collectives hide behind compute but for EXPOSED_SHARE of them; without the
    compiler options for it, none hides.
    """
    mesh, t, model = program.mesh, program.train, program.objective.model
    fsdp, tensor = mesh.shape["fsdp"], mesh.shape["tensor"]
    device, held = mesh.devices.flat[0], input_bytes(program, batch)
    state = held["parameters"] + held["optimizer_state"]
    rows = t.batch_size // t.accumulate // (mesh.size // tensor)
    layers = getattr(model, "num_layers", 1)
    units = rows * length * model.width * layers
    is_recomputed = getattr(model, "remat", "") == "full"
    stored = 2 + ACTIVATION_BYTES / tensor / layers if is_recomputed else ACTIVATION_BYTES / tensor
    flops = program.step_flops(length, t.batch_size)
    executed = flops * (4 / 3 if is_recomputed else 1) / mesh.size
    compute = executed / peak_flops(device) / PEAK_SHARE + STATE_PASSES * state / tpu_generation(device).hbm_bandwidth
    links, network = collective_seconds(mesh, program.num_params, t.accumulate, 8 * t.accumulate * units)
    moving, times = links + network, {"compute": compute, "links": links, "network between slices": network}
    hides = OVERLAP_OPTIONS.keys() <= (compiler_options(mesh) or {}).keys()
    seconds = max(compute, moving) + EXPOSED_SHARE * moving if hides else compute + moving
    return Outline(
        has_short_rows=fsdp > 1 and model.width % (8 * fsdp) > 0, seconds=seconds, exposed_seconds=seconds - compute,
        bound=max(times, key=times.__getitem__), flops=flops, num_params=program.num_params,
        hbm_bytes=sum(held.values()) + held["parameters"] / 2 + units * stored, mesh=MeshConfig(*mesh.devices.shape),
        accumulate=t.accumulate,
    )


def collective_seconds(mesh: Any, num_params: int, accumulate: int, activation_bytes: float) -> tuple[float, float]:
    """Return the time of the collectives of a step by formula, over the links and over the network between slices.

    `fsdp` gathers parameters in bfloat16 twice a microbatch and reduces their gradients once; `data` reduces a chip's
    share of them, over the network where it spans slices; `tensor` reduces activations four times a layer.

    Args:
        mesh: The mesh, of axes `data`, `fsdp` and `tensor`.
        num_params: Number of parameters.
        accumulate: Number of microbatches.
        activation_bytes: Bytes that a chip reduces over `tensor`.
    """
    devices = mesh.devices.flatten().tolist()
    seconds, ids = collective_timer(devices), np.arange(len(devices)).reshape(mesh.devices.shape)
    slices = num_slices(devices)
    data, fsdp, tensor = mesh.devices.shape
    share = 2 * num_params / tensor

    def time(kind: str, size: float, group: Any = ()) -> float:
        return seconds(Collective(kind, int(size), 1, False, tuple(group.tolist() if len(group) else ())))

    total = network = 0.0
    if fsdp > 1:
        gather, reduce = (time(kind, share, ids[0, :, 0]) for kind in ("all-gather", "reduce-scatter"))
        total += accumulate * (2 * gather + reduce)
    if data > slices:
        total += time("all-reduce", share / fsdp, ids[: data // slices, 0, 0])
    if slices > 1:
        network = time(f"all-reduce{BETWEEN_SLICES}", share / fsdp / (data // slices))
    if tensor > 1:
        total += time("all-reduce", activation_bytes, ids[0, 0])
    return total, network
