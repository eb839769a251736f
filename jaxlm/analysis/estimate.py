"""Estimate of a train step's time on a TPU, from the compiled HLO text.

Step time = Σ estimated_cycles × executions / clock over the scheduled instructions, plus the Mosaic kernels, for which
the compiler estimates no cycles. A kernel's time is that of its own schedule (kernels.py); without one it is charged
its FLOPs at KERNEL_PEAK_SHARE of the peak. Collectives have no cycles either and are not included. README.md in this
folder discusses the accuracy.
"""

from __future__ import annotations

import collections
import math
import re
from typing import Any, NamedTuple

from jaxlm.analysis.bundles import Count
from jaxlm.analysis.costs import hbm_bytes, placed_bytes, product_flops
from jaxlm.analysis.hlo import Instruction, Module, array_shapes, operand_shapes
from jaxlm.analysis.kernels import kernel_digest
from jaxlm.parallel.peaks import TPU, peak_flops, tpu_generation

KERNEL_PEAK_SHARE = 0.5
"""Assumed share of the peak FLOP/s that Mosaic kernels without a count reach."""
TOP = 10


class Estimate(NamedTuple):
    """Estimated time of one step on one device.

    Attributes:
        seconds: Step time.
        kernel_seconds: Part of `seconds` spent in Mosaic kernels.
        counted_kernels: Number of different kernels whose time is that of the compiler's schedule.
        charged_kernels: Number of different kernels that are charged by their FLOPs.
        executed_flops: FLOPs of the compiled program's matrix products.
        bytes_accessed: HBM traffic of a step.
        top: Operations that take longest: their name (digits replaced by #), seconds per step, share of the step's time
            and number of executions per step.
    """

    seconds: float
    kernel_seconds: float
    counted_kernels: int
    charged_kernels: int
    executed_flops: float
    bytes_accessed: float
    top: list[dict[str, Any]]


def estimate(module: Module, device: Any, counts: dict[str, Count] | None = None) -> Estimate | None:
    """Estimate the time of a compiled step on a device.

    Args:
        module: The compiled step.
        device: The device that it is compiled for.
        counts: Result of `count_kernels`.

    Returns:
        The estimate, or None for a chip of unknown clock.
    """
    chip, counts = tpu_generation(device), counts or {}
    if chip is None:
        return None
    peak, executed = peak_flops(device), product_flops(module)
    found: dict[str, tuple[float, int]] = collections.defaultdict(lambda: (0.0, 0))
    digests = set()
    for computation, runs in module.executions(fused=False).items():
        instructions = module.computations[computation]
        for instruction in instructions:
            name = re.sub(r"\d+", "#", instruction.op_name or f"({instruction.opcode})")
            if instruction.is_kernel:
                digest = kernel_digest(instruction)
                digests.add(digest)
                cost = kernel_cost(instruction, instructions, chip, peak, counts.get(digest))
                name, seconds = f"kernel {name}", cost.seconds
                executed += runs * cost.flops
            else:
                seconds = instruction.cycles / chip.clock
            if seconds:
                before = found[name]
                found[name] = (before[0] + runs * seconds, before[1] + runs)
    total = sum(time for time, _ in found.values())
    return Estimate(
        seconds=total,
        kernel_seconds=sum(time for name, (time, _) in found.items() if name.startswith("kernel ")),
        counted_kernels=len(digests & counts.keys()),
        charged_kernels=len(digests - counts.keys()),
        executed_flops=executed,
        bytes_accessed=hbm_bytes(module),
        top=[
            {"name": name, "seconds": time, "share": time / total if total else 0.0, "executions": runs}
            for name, (time, runs) in sorted(found.items(), key=lambda item: -item[1][0])[:TOP]
        ],
    )


class KernelCost(NamedTuple):
    """Time in seconds and FLOPs of one execution of a Mosaic kernel."""

    seconds: float
    flops: float


def kernel_cost(
    kernel: Instruction, computation: list[Instruction], chip: TPU, peak: float, count: Count | None = None
) -> KernelCost:
    """Estimate the cost of a kernel.

    With a count the time is that of its bundles, but no part is faster than its matrix products at the peak. The FLOPs
    are those of the matrix units, without the padding of attention heads narrower than a unit where the operands show
    it, and at most those of the kernel's own cost estimate. Without a count, `kernel_flops`, with that padding, take
    the time that KERNEL_PEAK_SHARE says. In either case the kernel's HBM traffic is a lower bound.

    Args:
        kernel: The kernel.
        computation: The instructions of its computation.
        chip: The chip.
        peak: Peak FLOP/s of the chip.
        count: The kernel's count, if there is one.
    """
    operands = [one.shape for one in computation if one.name in kernel.operand_names]
    transfer = sum(map(placed_bytes, [kernel.shape, *operands])) / chip.hbm_bandwidth
    arrays = _float_operands(kernel)
    padding = max(1.0, chip.mxu_width / arrays[0][-1]) if _is_attention(kernel) and arrays else 1.0
    if count is None:
        flops = kernel_flops(kernel)
        return KernelCost(max(flops * padding / (KERNEL_PEAK_SHARE * peak), transfer), flops)
    seconds = flops = 0.0
    for work, share in zip(count, (1.0, computed_share(kernel, computation)), strict=True):
        products = 2.0 * work.rows * chip.mxu_width**2 * chip.cores
        seconds += share * max(work.cycles / chip.clock, products / peak)
        flops += share * products / padding
    return KernelCost(max(seconds, transfer), min(flops, _stated_flops(kernel) or flops))


def computed_share(kernel: Instruction, computation: list[Instruction]) -> float:
    """Return the share of a kernel's conditional work that runs.

    Splash attention skips the blocks that its mask (operand 1) has as 0. If the mask is not in the
    module's text, it is assumed causal in a name scope with "causal", and full otherwise. Other kernels count all
    conditional work.
    """
    if "splash" not in kernel.name:
        return 1.0
    definitions = {one.name: one for one in computation}
    mask = definitions.get(kernel.operand_names[1])
    while mask is not None and mask.opcode in ("bitcast", "copy", "copy-start", "copy-done", "broadcast"):
        mask = definitions.get(mask.operand_names[0])
    blocks = re.findall(r"\d+", mask.operands) if mask is not None and mask.opcode == "constant" else []
    if blocks:
        return sum(block != "0" for block in blocks) / len(blocks)
    rows, columns = array_shapes(operand_shapes(kernel))[1][1][-2:]
    return (rows + 1) / (2 * rows) if _is_causal(kernel) and rows == columns else 1.0


def kernel_flops(kernel: Instruction) -> float:
    """Return the FLOPs of one execution of a Mosaic kernel.

    A kernel's own cost estimate is used if it states one, as the forward kernel of flash attention does. Otherwise the
    FLOPs of attention kernels follow from the shapes of queries [..., q, d] and keys [..., k, d], their first two
    floating-point operands: two products of 2·q·k·d FLOPs per head in the forward kernel, four in the gradient of keys
    and values, three in that of queries, five in the fused backward kernel. Every backward kernel recomputes the
    scores. A name scope that contains "causal" halves the FLOPs. Other kernels count 0 FLOPs and are timed by bytes.
    """
    if stated := _stated_flops(kernel):
        return stated
    arrays = _float_operands(kernel)
    if not _is_attention(kernel) or len(arrays) < 2:
        return 0.0
    queries, keys = arrays[:2]
    if re.search(r'use_fused_bwd_kernel\W+true', kernel.attributes) and "dkv" in kernel.name:
        products = 5
    else:
        products = next((n for part, n in (("dkv", 4), ("dq", 3)) if part in kernel.name + kernel.op_name), 2)
    causal = 0.5 if _is_causal(kernel) else 1.0
    return causal * products * 2.0 * math.prod(queries) * keys[-2]


def _stated_flops(kernel: Instruction) -> float:
    """Return the FLOPs of the kernel's own cost estimate; 0 without one."""
    match = re.search(r'"cost_estimate":\{[^}]*"flops":"(\d+)"', kernel.attributes)
    return float(match[1]) if match else 0.0


def _is_attention(kernel: Instruction) -> bool:
    return re.search(r"flash|splash|attention", kernel.name + kernel.op_name) is not None


def _is_causal(kernel: Instruction) -> bool:
    return "causal" in kernel.op_name


def _float_operands(kernel: Instruction) -> list[tuple[int, ...]]:
    """Return the shapes of floating-point operands, [..., length, head size] for attention."""
    shapes = [dims for dtype, dims in array_shapes(operand_shapes(kernel)) if "f" in dtype and len(dims) > 1]
    # Splash attention numbers its layouts; in layout 2 positions are last.
    positions_last = re.search(r"q_layout\W+2\b", kernel.attributes)
    return [(*dims[:-2], dims[-1], dims[-2]) for dims in shapes] if positions_last else shapes
