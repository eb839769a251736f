"""Compilation of a train step for NVIDIA GPUs on a machine without them, and a roofline of its time.

XLA's CUDA compiler needs no driver and no GPU, only a description of one. It states no costs, so the time is a
roofline: each scheduled operation takes its FLOPs at a share of the peak or its memory traffic at BANDWIDTH_SHARE of
the bandwidth, whichever is longer (configs/RESULTS.md: what GPUs said).
"""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.experimental import topologies

from jaxlm.analysis.costs import instruction_bytes, instruction_flops
from jaxlm.analysis.hlo import CONTROL_FLOW, Instruction, Module, array_shapes
from jaxlm.analysis.step import Estimate, Operation
from jaxlm.errors import UserError, install
from jaxlm.parallel.peaks import GPU, GPUS, gpu_model, peak_flops

PRODUCT_SHARE = 0.6
"""Assumed share of the peak FLOP/s that matrix products reach."""
ATTENTION_SHARE = 0.24
"""Share of the peak that cuDNN's attention of heads of 64 reaches, from the times of five steps on an H100."""
BANDWIDTH_SHARE = 0.85
"""Assumed share of the memory bandwidth that other operations reach."""
LAUNCH_SECONDS = 2e-6
"""Assumed least time of an operation."""
DEFAULT_MEMORY_SHARE = 0.75
"""Share of a GPU's memory that JAX reserves, unless one of MEMORY_SHARES says otherwise."""
MEMORY_SHARES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""Environment variables; the second is the older name."""
METHOD = (
    f"matrix products at {PRODUCT_SHARE:.0%} of the peak, fused attention at {ATTENTION_SHARE:.0%}, other operations "
    f"at {BANDWIDTH_SHARE:.0%} of the memory bandwidth, at least {LAUNCH_SECONDS * 1e6:.0f} µs each"
)
_NAME = re.compile(rf"(?:([1-9]\d*)x)?({'|'.join(GPUS)})(?::([1-9]\d*))?")


def is_gpu_topology(name: str) -> bool:
    """Return whether `name` is that of GPUs: "[HOSTSx]MODEL[:GPUS]", such as "h100:8" or "2xh100:8"."""
    return _NAME.fullmatch(name.strip().lower()) is not None


def gpu_devices(name: str) -> Sequence[Any]:
    """Return the abstract devices of a topology of GPUs, host by host."""
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        raise UserError(f"plans for GPUs need XLA's CUDA compiler; {install('gpu')}.")
    memory_share()
    hosts, model, count = _NAME.fullmatch(name.strip().lower()).groups()
    try:
        return topologies.get_topology_desc(
            platform="cuda", topology_name=model, target_config=_description(GPUS[model]),
            topology=f"1x{hosts or 1}x{count or 1}",  # slices x hosts x GPUs
        ).devices
    except Exception as error:  # the plugin raises errors of several types
        raise UserError(f"XLA's CUDA compiler fails for {name} ({error}); is the extra [gpu] whole?") from error


def _description(gpu: GPU) -> str:
    """Return XLA's description of a GPU, a GpuTargetConfigProto as text."""
    major, minor = gpu.capability
    return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {gpu.threads}
          shared_memory_per_block: 49152 shared_memory_per_core: {gpu.shared_memory}
          shared_memory_per_block_optin: {gpu.shared_memory - 1024}
          core_count: {gpu.multiprocessors} fpus_per_core: {gpu.lanes} clock_rate_ghz: {gpu.clock / 1e9}
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
          memory_bandwidth: {gpu.memory_bandwidth:.0f} l2_cache_size: {gpu.cache} device_memory_size: {gpu.memory}
          cuda_compute_capability {{ major: {major} minor: {minor} }}
        }}
        platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 }} device_description_str: "{gpu.kind}"
    """


def memory_share() -> float:
    """Return the share of a GPU's memory that JAX reserves."""
    if all(os.environ.get(name) for name in MEMORY_SHARES):
        raise UserError(f"the environment has both {' and '.join(MEMORY_SHARES)}, which jax refuses; unset the latter.")
    name = next((name for name in MEMORY_SHARES if os.environ.get(name)), None)
    text = os.environ[name] if name else str(DEFAULT_MEMORY_SHARE)
    if not re.fullmatch(r"1(\.0*)?|0?\.\d+", text):
        raise UserError(f"the environment variable {name} is {text!r}; set it to a number above 0 and up to 1.")
    return float(text)


def memory_limit(device: Any) -> int:
    """Return the memory in bytes that JAX reserves on a GPU."""
    return int(memory_share() * gpu_model(device).memory)


@contextlib.contextmanager
def as_if_attached(device: Any) -> Iterator[None]:
    """Let jax's cuDNN attention be traced for `device`; it asks the GPUs of this machine for their capability.

    There is no public way, so two functions of a private module are replaced.
    """
    capability = gpu_model(device).capability

    def parsed(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")))

    replacements = {
        "check_compute_capability": lambda least: capability >= parsed(least),
        "is_cuda_compute_capability_equal": lambda other: capability == parsed(other),
    }
    try:
        from jax._src.cudnn import fused_attention_stablehlo as module

        before = {name: getattr(module, name) for name in replacements}
    except (ImportError, AttributeError) as error:
        raise UserError(f"plans for GPUs need jax 0.10 to 0.12: {error}.") from error
    try:
        vars(module).update(replacements)
        yield
    finally:
        vars(module).update(before)


class Cost(NamedTuple):
    """Cost of one execution of an operation: by FLOPs if `is_compute`, else by memory traffic."""

    seconds: float
    flops: float
    bytes: int
    is_compute: bool


def operation_costs(module: Module, device: Any) -> dict[str, Cost]:
    """Return the cost of each scheduled instruction that has one, by name."""
    gpu, costs = gpu_model(device), {}
    for computation in module.executions(fused=False):
        shapes = {one.name: one.shape for one in module.computations[computation]}
        for one in module.computations[computation]:
            flops = instruction_flops(module.computations, one, shapes)
            size = instruction_bytes(module.computations, one, shapes)
            if not flops and not size:
                continue
            # Products of float32 are TF32's, at half the peak.
            is_float32 = bool(flops and array_shapes(shapes[one.operand_names[0]])[0][0] == "f32")
            share = ATTENTION_SHARE if "fmha" in one.library_call else PRODUCT_SHARE
            compute = (1 + is_float32) * flops / (share * peak_flops(device))
            seconds = max(compute, size / (BANDWIDTH_SHARE * gpu.memory_bandwidth), LAUNCH_SECONDS)
            costs[one.name] = Cost(seconds, flops, size, seconds == compute)
    return costs


def roofline(module: Module, costs: dict[str, Cost]) -> Estimate:
    """Return the time of a compiled step, from the costs of its operations."""
    operations: dict[str, Operation] = collections.defaultdict(Operation)
    executed = accessed = computing = 0.0
    for computation, runs in module.executions(fused=False).items():
        for instruction in module.computations[computation]:
            if cost := costs.get(instruction.name):
                executed, accessed = executed + runs * cost.flops, accessed + runs * cost.bytes
                computing += runs * cost.seconds * cost.is_compute
                name = re.sub(r"\d+", "#", instruction.op_name or f"({instruction.opcode})")
                before = operations[name]
                operations[name] = Operation(before.seconds + runs * cost.seconds, before.executions + runs)
    seconds = sum(operation.seconds for operation in operations.values())
    bound = "compute" if computing >= seconds / 2 else "memory"
    return Estimate(seconds, executed, accessed, METHOD, None, dict(operations), bound, is_roofline=True)


def hiding(costs: dict[str, Cost]) -> Callable[[Instruction], float]:
    """Return the function of an instruction that returns the time for which it can hide a collective."""
    def seconds(instruction: Instruction) -> float:
        if instruction.opcode in CONTROL_FLOW:
            return math.inf
        return costs[instruction.name].seconds if instruction.name in costs else 0.0

    return seconds
