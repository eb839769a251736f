"""Time and FLOPs of Mosaic kernels (`pallas_call` on TPU), for which the compiler estimates no cycles.

kernels.json has the work of the main presets' kernels, counted in the compiler's own schedule of each. A kernel that it
lacks is charged its FLOPs at KERNEL_PEAK_SHARE of the peak; launch/tables/count_kernels.py adds it.
"""

from __future__ import annotations

import functools
import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

from jaxlm.analysis.costs import placed_bytes
from jaxlm.analysis.hlo import Instruction, array_shapes, operand_shapes
from jaxlm.parallel.peaks import peak_flops, tpu_generation

KERNEL_PEAK_SHARE = 0.5
"""Assumed share of the peak FLOP/s that kernels without a count reach."""
RECORD = Path(__file__).with_name("kernels.json")


class KernelCost(NamedTuple):
    """Cost of one execution of a Mosaic kernel.

    Attributes:
        seconds: Time.
        flops: FLOPs of its matrix products.
        is_counted: Whether both follow from a recorded count.
    """

    seconds: float
    flops: float
    is_counted: bool


class Count(NamedTuple):
    """Recorded work of a kernel on one device.

    Attributes:
        rows: Number of rows of the batch, to which the work is proportional.
        cycles: Instruction bundles, one a cycle, but no fewer than the matrix products take at the peak.
        flops: FLOPs of the matrix products, without the padding of narrow attention heads.
        conditional_cycles: Further cycles behind branches that depend on data, such as the blocks that an attention
            mask skips, as if none were skipped.
        conditional_flops: FLOPs of those.
    """

    rows: int
    cycles: float
    flops: float
    conditional_cycles: float = 0.0
    conditional_flops: float = 0.0


@functools.cache
def recorded_counts() -> dict[str, dict[str, Count]]:
    """Return the recorded counts by chip and `kernel_key`."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    return {chip: {key: Count(*count) for key, count in counts.items()} for chip, counts in record.items()}


def kernel_key(kernel: Instruction) -> str:
    """Return the key of a kernel in the record: its name, FLOPs a row, and arrays without their first dimension.

    Unlike the kernel's program, these stay the same when its code moves or jax changes. The FLOPs tell a causal kernel
    or a band from full attention, and one key serves all batch sizes.
    """
    operands, results = (
        " ".join(f"{dtype}[{','.join(map(str, dims[1:]))}]" for dtype, dims in array_shapes(shapes))
        for shapes in (operand_shapes(kernel), kernel.shape)
    )
    flops = kernel_flops(kernel) / num_rows(kernel)
    return f"{kernel.name.partition('.')[0]} {flops:.0f} ({operands}) -> ({results})"


def num_rows(kernel: Instruction) -> int:
    """Return the number of rows of the batch that a kernel computes: the first dimension of its last result."""
    return next((dims[0] for _, dims in array_shapes(kernel.shape)[::-1] if dims), 1)


def kernel_cost(kernel: Instruction, computation: list[Instruction], device: Any) -> KernelCost:
    """Estimate the cost of a kernel: its recorded count, or its FLOPs at KERNEL_PEAK_SHARE of the peak.

    In either case the kernel's HBM traffic is a lower bound of its time.
    """
    chip = tpu_generation(device)
    operands = [one.shape for one in computation if one.name in kernel.operand_names]
    transfer = sum(map(placed_bytes, [kernel.shape, *operands])) / chip.hbm_bandwidth
    if count := recorded_counts().get(device.device_kind, {}).get(kernel_key(kernel)):
        scale, share = num_rows(kernel) / count.rows, computed_share(kernel, computation)
        cycles = scale * (count.cycles + share * count.conditional_cycles)
        flops = scale * (count.flops + share * count.conditional_flops)
        return KernelCost(max(cycles / chip.clock, transfer), flops, True)
    flops = kernel_flops(kernel)
    if "splash" in kernel.name and (band := re.search(r"band_(\d+)_", kernel.op_name)):
        flops *= min(1.0, int(band[1]) / _splash_operands(kernel)[1][-1])
    padded = flops * head_padding(kernel, chip.mxu_width)
    return KernelCost(max(padded / (KERNEL_PEAK_SHARE * peak_flops(device)), transfer), flops, False)


def computed_share(kernel: Instruction, computation: list[Instruction]) -> float:
    """Return the share of a kernel's conditional work that runs.

    Splash attention skips the blocks that its mask (operand 1) has as 0. If the mask is not in the module's text, it is
    assumed causal in a name scope with "causal", and full otherwise. Other kernels count all conditional work.
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
    return (rows + 1) / (2 * rows) if "causal" in kernel.op_name and rows == columns else 1.0


def head_padding(kernel: Instruction, mxu_width: int) -> float:
    """Return by what factor heads narrower than a matrix unit raise the work of splash attention."""
    return max(1.0, mxu_width / _splash_operands(kernel)[0][-2]) if "splash" in kernel.name else 1.0


def kernel_flops(kernel: Instruction) -> float:
    """Return the FLOPs of one execution of a Mosaic kernel: those of its own cost estimate, if it states one.

    Splash attention does not. Its FLOPs follow from the shapes of queries [..., d, q] and keys [..., d, k]: two
    products of 2·q·k·d FLOPs a head in the forward kernel, five in the backward kernel, which computes the scores
    again, over all keys. A name scope that contains "causal" halves them. Others count 0 FLOPs and are timed by bytes.
    """
    stated = stated_flops(kernel)
    if stated or "splash" not in kernel.name:
        return stated
    queries, keys = _splash_operands(kernel)[:2]
    products = 5 if "dkv" in kernel.name else 2
    causal = 0.5 if "causal" in kernel.op_name else 1.0
    return causal * products * 2.0 * math.prod(queries) * keys[-1]


def stated_flops(kernel: Instruction) -> float:
    """Return the FLOPs of the kernel's own cost estimate; 0 without one."""
    match = re.search(r'"cost_estimate":\{[^}]*"flops":"(\d+)"', kernel.attributes)
    return float(match[1]) if match else 0.0


def _splash_operands(kernel: Instruction) -> list[tuple[int, ...]]:
    """Return the shapes of splash attention's floating-point operands, whose first are queries and keys."""
    return [dims for dtype, dims in array_shapes(operand_shapes(kernel)) if "f" in dtype and len(dims) > 1]
