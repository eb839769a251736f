"""Compilation of a train step for TPUs or GPUs, on a machine without them."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from jaxlm.analysis import gpu
from jaxlm.analysis.estimate import estimate
from jaxlm.analysis.hlo import cycles_window, traffic
from jaxlm.analysis.links import collective_timer
from jaxlm.analysis.step import BatchShapes, CompiledStep, input_bytes, mesh_text, read_compiled
from jaxlm.errors import UserError, install
from jaxlm.models.layers.kernel_choice import recorded_choices
from jaxlm.training.program import Program
from jaxlm.types import Report

EXAMPLES = (
    "v4:2x2x2, v5e:16x16, v5p:4x4x4, v5litepod-16, 2xv5e:16x16 for two slices, h100:8 or, for two hosts, 2xh100:8"
)

ENVIRONMENT = {
    # Without a chip there is nothing to lock, and no metadata server to query.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_STDERR_LOG_LEVEL": "3", "TPU_MIN_LOG_LEVEL": "3",
    # The partitioner of the CUDA compiler warns of ways that it only considers.
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
ACCELERATOR_TYPES = {"v2": (2, 2), "v3": (2, 2), "v4": (2, 3), "v5p": (2, 3), "v5e": (1, 2), "v6e": (1, 2)}
"""Generation → what the number of an accelerator type counts per chip (TensorCores or chips), and the mesh's axes."""
_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def prepare_environment() -> None:
    """Restrict jax to the CPU and let the TPU compiler run without a TPU. Must be called before jax is first used."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")  # jax has read the environment at import
    jax.config.update("jax_enable_compilation_cache", False)  # it is for programs that this machine can load
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def compile_step(
    program: Program, batch: BatchShapes, topology: str, hlo: Path | None = None, report: Report = print
) -> CompiledStep:
    """Compile a train step.

    The text of the compiled module is written to `hlo`.

    Raises:
        UserError: The compiler refuses the step for another reason than HBM.
    """
    devices = program.mesh.devices.flatten().tolist()
    report(f"Tracing the step for {topology}, mesh {mesh_text(program.mesh.shape)} …")
    start = time.perf_counter()
    device = devices[0]
    is_gpu = device.platform == "gpu"
    with gpu.as_if_attached(device) if is_gpu else contextlib.nullcontext():
        with recorded_choices() as kernels:
            lowered = program.lower(batch)
        if kernels():
            report(f"Attention: {kernels()}.")
        report("Compiling it, which takes minutes for many layers …")
        try:
            compiled = lowered.compile()
        except Exception as error:  # the compiler raises errors of several types
            message, by_kind = str(error), input_bytes(program, batch)
            used = _used_bytes(message)
            if used is None:
                raise UserError(refusal(topology, message)) from error
            # The message about temporaries does not count the step's inputs.
            used += sum(by_kind.values()) if "temporaries" in message else 0
            return CompiledStep(by_kind, used, None, {}, time.perf_counter() - start, message=_first_line(message))
    seconds = time.perf_counter() - start
    report("Counting the work of the compiled step …")
    module, by_kind = read_compiled(compiled, program, batch, hlo)
    if is_gpu:
        costs = gpu.operation_costs(module, device)
        time_without_collectives, compute = gpu.roofline(module, costs), gpu.hiding(costs)
    else:
        time_without_collectives, compute = estimate(module, device), cycles_window
    return CompiledStep(
        by_kind, sum(by_kind.values()), time_without_collectives,
        traffic(module, collective_timer(devices), compute), seconds, module.kernels(),
    )


def topology_devices(name: str) -> Sequence[Any]:
    """Return the abstract devices of a topology "[SLICESx]GENERATION:AxB[xC]" (chips along each axis).

    "[SLICESx]TYPE" with an accelerator type of Google Cloud, such as v5litepod-16, is the topology of that slice, and
    "[HOSTSx]MODEL:GPUS" that of GPUs.
    """
    if gpu.is_gpu_topology(name):
        return gpu.gpu_devices(name)
    n = r"[1-9]\d*"
    pattern = rf"(?:({n})x)?(v\d+\w*|tpu\d+\w*)(?:-({n})|:({n}(?:x{n}){{1,2}}))"
    match = re.fullmatch(pattern, name.strip().lower())
    slices, generation, count, chips = match.groups() if match else [None] * 4
    generation = "v5e" if generation == "v5litepod" else generation
    chips = slice_shape(generation, int(count)) if count else chips
    if not chips:
        raise UserError(f"{name!r} is not a topology; write the generation and its chips, such as {EXAMPLES}.")
    if generation not in (*ACCELERATOR_TYPES, "v7x", "tpu7x"):
        raise UserError(f"there is no TPU topology {name}; try {EXAMPLES}.")
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(f"plans for TPUs need their compiler (libtpu); {install('tpu')}.")
    options: dict[str, Any] = {"num_slices": int(slices)} if slices else {}
    if generation == "v7x":
        generation = "tpu7x"
    if generation == "v4":
        options["chip_config_name"] = "megacore"  # jax has one device per v4 chip
    if math.prod(map(int, chips.split("x"))) == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=f"{generation}:{chips}", **options).devices
    except Exception as error:  # libtpu raises runtime errors of several types
        raise UserError(
            f"there is no TPU topology {name} ({_first_line(str(error)).rstrip('.')}); try {EXAMPLES}."
        ) from error


def slice_shape(generation: str, count: int) -> str | None:
    """Return the chips along each axis of an accelerator type, "4x4" for v5e-16.

    None if the generation is unknown or the chips are no power of two: such slices have no default shape.
    """
    if generation not in ACCELERATOR_TYPES:
        return None
    per_chip, axes = ACCELERATOR_TYPES[generation]
    chips, rest = divmod(count, per_chip)
    power = chips.bit_length() - 1
    if rest or chips != 2**power:
        return None
    sizes = [2 ** ((power + axis) // axes) for axis in range(axes)]
    return "x".join(map(str, sizes if sizes[0] > 1 else sizes[::-1]))


def hbm_limit(device: Any) -> int:
    """Return the memory of a device in bytes: of a TPU from the compiler's message about a too large program."""
    if device.platform == "gpu":
        return gpu.memory_limit(device)
    sharding = jax.sharding.SingleDeviceSharding(device)
    huge = jax.ShapeDtypeStruct((2**20, 2**20), jnp.float32)
    try:
        jax.jit(lambda x: x + 1, in_shardings=sharding, out_shardings=sharding).lower(huge).compile()
    except jax.errors.JaxRuntimeError as error:
        if match := re.search(r"(?:available HBM \(| of )([\d.]+)([KMGT]?)", str(error)):
            return _bytes(match)
        raise
    raise RuntimeError("the TPU compiler accepted a program of four terabytes")


def _used_bytes(message: str) -> int | None:
    """Return the HBM in bytes that a program needs, from the compiler's error message; None for other errors."""
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    match = re.search(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm", message) or re.search(
        r"required for [\w ]+\(([\d.]+)([KMGT]?)\) exceeds available HBM", message
    )
    return _bytes(match) if match else None


def refusal(topology: str, message: str) -> str:
    """Return an error message for a step that the compiler refuses for another reason than HBM."""
    sentence = f"the compiler refuses this step for {topology}: {_first_line(message).rstrip('.')}"
    space = re.search(r"\b[vs]mem\b", message)
    if "RESOURCE_EXHAUSTED" not in message or space is None:
        return f"{sentence}."
    return (
        f"{sentence}. {space[0].upper()} is on-chip memory for one operation at a time; this says nothing about HBM. "
        "If the operation is an attention kernel, set --objective.model.attention xla."
    )


def _bytes(match: re.Match[str]) -> int:
    return round(float(match[1]) * _UNITS[match[2]])


def _first_line(text: str) -> str:
    text = re.sub(r"^[A-Z_]+: (E\d+: \w+:\s+)?", "", text.strip())  # drop error codes
    text = re.sub(r" = \(.*?(?=Scoped allocation)", ": ", text, flags=re.DOTALL)  # drop the operation's text
    return (text.splitlines() or ["no reason given"])[0][:300]
