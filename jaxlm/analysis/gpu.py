"""Compilation of a train step for NVIDIA GPUs on a machine without them, and a roofline of its time.

XLA's CUDA compiler needs no driver and no GPU, only a description of one. It states no costs, so the time is a
roofline: each scheduled operation takes its FLOPs at PRODUCT_SHARE of the peak or its memory traffic at BANDWIDTH_SHARE
of the bandwidth, whichever is longer. No GPU has confirmed these shares.
"""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from jax.experimental import topologies

from jaxlm.analysis.costs import instruction_bytes, instruction_flops
from jaxlm.analysis.hlo import Module, array_shapes
from jaxlm.analysis.step import Estimate, Operation
from jaxlm.errors import UserError
from jaxlm.parallel.peaks import GPU, GPUS, gpu_model, peak_flops

PRODUCT_SHARE = 0.6
"""Assumed share of the peak FLOP/s that matrix products and attention kernels reach."""
BANDWIDTH_SHARE = 0.85
"""Assumed share of the memory bandwidth that other operations reach."""
LAUNCH_SECONDS = 2e-6
"""Assumed least time of an operation."""
DEFAULT_MEMORY_SHARE = 0.75
"""Share of a GPU's memory that JAX reserves, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise."""
COMPILER_OPTIONS = {"xla_gpu_enable_triton_gemm": False}
"""Triton chooses the tiles of a matrix product by timing them; without a GPU every product is cuBLAS's."""

_NAME = re.compile(rf"(?:(\d+)x)?({'|'.join(GPUS)})(?::(\d+))?")


def is_gpu_topology(name: str) -> bool:
    """Return whether `name` is that of GPUs: "[HOSTSx]MODEL[:GPUS]", such as "h100:8" or "2xh100:8"."""
    return _NAME.fullmatch(name.strip().lower()) is not None


def require_compiler() -> None:
    """Raise UserError if the CUDA compiler is not installed."""
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        raise UserError("plans for GPUs need XLA's CUDA compiler; in the clone, run `pip install -e '.[gpu]'`.")


def gpu_devices(name: str) -> Sequence[Any]:
    """Return the abstract devices of a topology of GPUs, host by host.

    Raises:
        UserError: The compiler is not installed.
    """
    require_compiler()
    hosts, model, count = _NAME.fullmatch(name.strip().lower()).groups()
    return topologies.get_topology_desc(
        platform="cuda", topology_name=model, target_config=_description(GPUS[model]),
        topology=f"1x{hosts or 1}x{count or 1}",  # slices x hosts x GPUs
    ).devices


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


def memory_limit(device: Any) -> int:
    """Return the memory in bytes that JAX reserves on a GPU."""
    share = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or DEFAULT_MEMORY_SHARE)
    return int(share * gpu_model(device).memory)


@contextlib.contextmanager
def as_if_attached(device: Any) -> Iterator[None]:
    """Let jax's cuDNN attention be traced for `device`; it asks the GPUs of this machine for their capability.

    There is no public way, so two functions of a private module are replaced.

    Raises:
        UserError: This version of jax has them elsewhere.
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


def roofline(module: Module, device: Any) -> Estimate:
    """Return the time of a compiled step on a GPU by the roofline of each operation."""
    gpu, flops_per_second = gpu_model(device), PRODUCT_SHARE * peak_flops(device)
    operations: dict[str, Operation] = collections.defaultdict(Operation)
    executed = accessed = computing = 0.0
    for computation, runs in module.executions(fused=False).items():
        shapes = {one.name: one.shape for one in module.computations[computation]}
        for instruction in module.computations[computation]:
            flops = instruction_flops(module.computations, instruction, shapes)
            size = instruction_bytes(module.computations, instruction, shapes)
            executed, accessed = executed + runs * flops, accessed + runs * size
            if not flops and not size:
                continue
            # Products of float32 are TF32's, at half the peak.
            is_float32 = flops and array_shapes(shapes[instruction.operand_names[0]])[0][0] == "f32"
            compute = flops * (2 if is_float32 else 1) / flops_per_second
            seconds = max(compute, size / (BANDWIDTH_SHARE * gpu.memory_bandwidth), LAUNCH_SECONDS)
            computing += runs * seconds * (seconds == compute)
            name = re.sub(r"\d+", "#", instruction.op_name or f"({instruction.opcode})")
            before = operations[name]
            operations[name] = Operation(before.seconds + runs * seconds, before.executions + runs)
    method = (
        f"matrix products at {PRODUCT_SHARE:.0%} of the peak, other operations at {BANDWIDTH_SHARE:.0%} of the memory "
        f"bandwidth, at least {LAUNCH_SECONDS * 1e6:.0f} µs each"
    )
    seconds = sum(operation.seconds for operation in operations.values())
    bound = "compute" if computing >= seconds / 2 else "memory"
    return Estimate(seconds, executed, accessed, method, None, dict(operations), bound, is_roofline=True)
