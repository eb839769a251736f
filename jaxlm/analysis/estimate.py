"""Estimate of a train step's time on a TPU, from the compiled HLO text and the compiler's cost figures.

Step time = Σ estimated_cycles × executions / clock over the scheduled instructions, plus the Mosaic kernels. The
compiler estimates no cycles for kernels: each takes the longer of its FLOPs at KERNEL_PEAK_SHARE of the peak and the
bytes of its operands and results at the HBM bandwidth. Collectives have no cycles either and are not included.
README.md in this folder discusses the accuracy.
"""

from __future__ import annotations

import collections
import math
import re
from typing import Any, NamedTuple

from jaxlm.analysis.hlo import Instruction, Module, array_bytes, array_shapes
from jaxlm.parallel.peaks import TPU, peak_flops, tpu_generation

KERNEL_PEAK_SHARE = 0.5
"""Assumed share of the peak FLOP/s that Mosaic kernels reach."""
TOP = 10


class Estimate(NamedTuple):
    """Estimated time of one step on one device.

    Attributes:
        seconds: Step time.
        kernel_seconds: Part of `seconds` spent in Mosaic kernels.
        roofline_seconds: Lower bound from the model FLOPs and the bytes accessed.
        bytes_accessed: HBM traffic of a step.
        top: Operations that take longest: their name (digits replaced by #), seconds per step, share of the step's time
            and number of executions per step.
    """

    seconds: float
    kernel_seconds: float
    roofline_seconds: float
    bytes_accessed: float
    top: list[dict[str, Any]]


def estimate(module: Module, cost: dict[str, float], device: Any, flops: float) -> Estimate | None:
    """Estimate the time of a compiled step on a device.

    `cost_analysis()` counts a loop's body once, so its bytes are scaled by the ratio of the module's cycles with and
    without trip counts.

    Args:
        module: The compiled step.
        cost: Result of `compiled.cost_analysis()`.
        device: The device that it is compiled for.
        flops: Model FLOPs of the step on one device, for the roofline.

    Returns:
        The estimate, or None for a chip of unknown clock.
    """
    chip = tpu_generation(device)
    if chip is None:
        return None
    peak = peak_flops(device)
    seconds = _seconds_by_operation(module, chip, peak, module.executions(fused=False))
    total = sum(time for time, _ in seconds.values())
    without_loops = _seconds_by_operation(module, chip, peak, module.executions(fused=False, loops=False))
    once = sum(time for time, _ in without_loops.values())
    accessed = cost.get("bytes accessed", 0.0) * (total / once if once else 1.0)
    ranked = sorted(seconds.items(), key=lambda item: -item[1][0])[:TOP]
    return Estimate(
        seconds=total,
        kernel_seconds=sum(time for name, (time, _) in seconds.items() if name.startswith("kernel ")),
        roofline_seconds=max(flops / peak, accessed / chip.hbm_bandwidth),
        bytes_accessed=accessed,
        top=[
            {"name": name, "seconds": time, "share": time / total if total else 0.0, "executions": runs}
            for name, (time, runs) in ranked
        ],
    )


def _seconds_by_operation(
    module: Module, chip: TPU, peak: float, executions: dict[str, int]
) -> dict[str, tuple[float, int]]:
    """Return (seconds, executions) of all instructions that take time, by operation name."""
    found: dict[str, tuple[float, int]] = collections.defaultdict(lambda: (0.0, 0))
    for computation, runs in executions.items():
        for instruction in module.computations[computation]:
            name = re.sub(r"\d+", "#", instruction.op_name or f"({instruction.opcode})")
            if instruction.is_kernel:
                name, seconds = f"kernel {name}", kernel_seconds(instruction, chip, peak)
            else:
                seconds = instruction.cycles / chip.clock
            if seconds:
                before = found[name]
                found[name] = (before[0] + runs * seconds, before[1] + runs)
    return dict(found)


def kernel_seconds(kernel: Instruction, chip: TPU, peak: float) -> float:
    """Estimate the time of one execution of a Mosaic kernel.

    FLOPs are scaled by matrix unit width / head size where heads are narrower than the matrix unit.
    """
    arrays = _float_operands(kernel)
    operands = _operand_shapes(kernel)
    size = sum(array_bytes(operands)) + sum(array_bytes(kernel.shape))
    padding = max(1.0, chip.mxu_width / arrays[0][-1]) if _is_attention(kernel) and arrays else 1.0
    return max(kernel_flops(kernel) * padding / (KERNEL_PEAK_SHARE * peak), size / chip.hbm_bandwidth)


def kernel_flops(kernel: Instruction) -> float:
    """Return the FLOPs of one execution of a Mosaic kernel.

    A kernel's own cost estimate is used if it states one, as the forward kernel of flash attention does. Otherwise the
    FLOPs of attention kernels follow from the shapes of queries [..., q, d] and keys [..., k, d], their first two
    floating-point operands: two products of 2·q·k·d FLOPs per head in the forward kernel, four in the gradient of keys
    and values, three in that of queries, five in the fused backward kernel. Every backward kernel recomputes the
    scores. A name scope that contains "causal" halves the FLOPs. Other kernels count 0 FLOPs and are timed by bytes.
    """
    if match := re.search(r'"cost_estimate":\{[^}]*"flops":"(\d+)"', kernel.attributes):
        return float(match[1])
    arrays = _float_operands(kernel)
    if not _is_attention(kernel) or len(arrays) < 2:
        return 0.0
    queries, keys = arrays[:2]
    if re.search(r'use_fused_bwd_kernel\W+true', kernel.attributes) and "dkv" in kernel.name:
        products = 5
    else:
        products = next((n for part, n in (("dkv", 4), ("dq", 3)) if part in kernel.name + kernel.op_name), 2)
    causal = 0.5 if "causal" in kernel.op_name else 1.0
    return causal * products * 2.0 * math.prod(queries) * keys[-2]


def _is_attention(kernel: Instruction) -> bool:
    return re.search(r"flash|splash|attention", kernel.name + kernel.op_name) is not None


def _operand_shapes(kernel: Instruction) -> str:
    match = re.search(r"operand_layout_constraints=\{(.*?\})\}", kernel.attributes, re.DOTALL)
    return match[1] if match else ""


def _float_operands(kernel: Instruction) -> list[tuple[int, ...]]:
    """Return the shapes of floating-point operands, [..., length, head size] for attention."""
    shapes = [dims for dtype, dims in array_shapes(_operand_shapes(kernel)) if "f" in dtype and len(dims) > 1]
    # Splash attention numbers its layouts; in layout 2 positions are last.
    positions_last = re.search(r"q_layout\W+2\b", kernel.attributes)
    return [(*dims[:-2], dims[-1], dims[-2]) for dims in shapes] if positions_last else shapes
