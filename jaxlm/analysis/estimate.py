"""Estimate of a train step's time on a TPU, from the compiled HLO text and the compiler's own cost figures.

Step time = Σ estimated_cycles × executions / clock over the scheduled instructions, plus the Mosaic kernels, for which
the compiler gives no cycles: each takes the longer of its FLOPs at KERNEL_PEAK_SHARE of the peak and its operands' and
results' bytes at the HBM bandwidth. Collectives carry no cycles either and are not included. README.md in this folder
says how far the figures can be trusted.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from typing import Any

from jaxlm.analysis.hlo import Instruction, Module, array_bytes, array_shapes
from jaxlm.parallel.peaks import TPU, peak_flops, tpu_generation

KERNEL_PEAK_SHARE = 0.5
"""Share of the peak at which a Mosaic kernel's FLOPs are counted. An assumption, not a measurement."""
TOP = 10


@dataclasses.dataclass(frozen=True)
class Operation:
    """All instructions of one name scope: seconds a step, share of the step, and how many times they run."""

    name: str
    seconds: float
    share: float
    executions: int


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Estimated time of one step on one device, in seconds.

    kernel_seconds: the part of `seconds` that Mosaic kernels take. bytes_accessed: HBM traffic of a step.
    """

    seconds: float
    kernel_seconds: float
    roofline_seconds: float
    bytes_accessed: float
    top: tuple[Operation, ...]


def estimate(module: Module, cost: dict[str, float], device: Any, flops: float) -> Estimate | None:
    """The estimate of a compiled step for `device`; None for a chip whose clock is not known.

    cost: `compiled.cost_analysis()`. flops: model FLOPs of the step on one device, for the roofline: the larger of
    flops / peak and bytes accessed / bandwidth. cost_analysis() counts a loop's body once: its bytes are scaled by the
    ratio of the module's cycles with and without trip counts.
    """
    chip = tpu_generation(device)
    if chip is None:
        return None
    peak = peak_flops(device)
    seconds = _seconds_by_operation(module, chip, peak, module.executions(fused=False))
    total = sum(one for one, _ in seconds.values())
    once = sum(one for one, _ in
               _seconds_by_operation(module, chip, peak, module.executions(fused=False, loops=False)).values())
    accessed = cost.get("bytes accessed", 0.0) * (total / once if once else 1.0)
    ranked = sorted(seconds.items(), key=lambda item: -item[1][0])[:TOP]
    return Estimate(
        seconds=total,
        kernel_seconds=sum(one for name, (one, _) in seconds.items() if name.startswith("kernel ")),
        roofline_seconds=max(flops / peak, accessed / chip.hbm_bandwidth),
        bytes_accessed=accessed,
        top=tuple(Operation(name, one, one / total if total else 0.0, runs) for name, (one, runs) in ranked),
    )


def _seconds_by_operation(
    module: Module, chip: TPU, peak: float, executions: dict[str, int]
) -> dict[str, tuple[float, int]]:
    """Operation name → (seconds, executions) of all instructions that take time."""
    found: dict[str, tuple[float, int]] = collections.defaultdict(lambda: (0.0, 0))
    for computation, runs in executions.items():
        for one in module.computations[computation]:
            name = re.sub(r"\d+", "#", one.op_name or f"({one.opcode})")
            if one.is_kernel:
                name, seconds = f"kernel {name}", kernel_seconds(one, chip, peak)
            else:
                seconds = one.cycles / chip.clock
            if seconds:
                before = found[name]
                found[name] = (before[0] + runs * seconds, before[1] + runs)
    return dict(found)


def kernel_seconds(kernel: Instruction, chip: TPU, peak: float) -> float:
    """Estimated time of one execution of a Mosaic kernel.

    A head narrower than the matrix unit leaves a part of it idle: the FLOPs are scaled by width / head size.
    """
    arrays = _float_operands(kernel)
    operands = _operand_shapes(kernel)
    size = sum(array_bytes(operands)) + sum(array_bytes(kernel.shape))
    padding = max(1.0, chip.mxu_width / arrays[0][-1]) if _is_attention(kernel) and arrays else 1.0
    return max(kernel_flops(kernel) * padding / (KERNEL_PEAK_SHARE * peak), size / chip.hbm_bandwidth)


def kernel_flops(kernel: Instruction) -> float:
    """FLOPs of one execution of a Mosaic kernel.

    They are those of the kernel's own cost estimate if it states one (the forward kernel of flash attention does).
    Otherwise, for attention kernels, from the shapes of queries [..., q, d] and keys [..., k, d], their first two
    floating-point operands: two products of 2·q·k·d FLOPs a head in the forward kernel, four in the gradient of keys
    and values, three in that of queries, five in the fused backward kernel (each backward kernel computes the scores
    again). Blocks that a causal mask skips are known from the name scope only: FLOPs in a scope with "causal" in its
    name are halved. 0 for other kernels: their time is that of their bytes.
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
    """Shapes of the floating-point operands with at least two dimensions, [..., length, head size] for attention."""
    shapes = [dims for dtype, dims in array_shapes(_operand_shapes(kernel)) if "f" in dtype and len(dims) > 1]
    # Splash attention names its layouts by number; 2 has the positions last.
    positions_last = re.search(r"q_layout\W+2\b", kernel.attributes)
    return [(*dims[:-2], dims[-1], dims[-2]) for dims in shapes] if positions_last else shapes
