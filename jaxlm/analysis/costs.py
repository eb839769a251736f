"""FLOPs and HBM traffic of a compiled module, instruction by instruction.

The compiler's own totals (`cost_analysis()`) count a loop's body once, on-chip memory as HBM, and an array of which a
fusion reads one slice as a whole.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator

import numpy as np

from jaxlm.analysis.hlo import (
    BITS,
    CONTROL_FLOW,
    KINDS,
    Instruction,
    Module,
    array_shapes,
    elements,
    operand_shapes,
)

Computations = dict[str, list[Instruction]]

_FREE = (
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "optimization-barrier", *CONTROL_FLOW, *KINDS, *(f"{kind}-start" for kind in KINDS),
)
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](?:\{([\d,]*)((?::|,)[^}]*)?\})?")
_SLICES = ("dynamic-slice", "slice", "gather")
_WINDOW = {"stride": 1, "pad": 0, "lhs_dilate": 1, "rhs_dilate": 1}


def product_flops(module: Module) -> float:
    """Return the FLOPs of all matrix products and convolutions in one run, without those inside Mosaic kernels."""
    return sum(
        runs * computation_flops(module.computations[name]) for name, runs in module.executions(fused=True).items()
    )


def computation_flops(instructions: list[Instruction]) -> float:
    """Return the FLOPs of the matrix products and convolutions of a computation, without those that it calls."""
    if not any(one.opcode in ("dot", "convolution") or one.library_call for one in instructions):
        return 0.0
    shapes = {one.name: one.shape for one in instructions}
    return sum(_flops(one, shapes) for one in instructions)


def instruction_flops(computations: Computations, instruction: Instruction, shapes: dict[str, str]) -> float:
    """Return the FLOPs of one execution of a scheduled instruction; the arguments are those of `instruction_bytes`."""
    if instruction.opcode == "fusion":
        return computation_flops(computations[next(instruction.called())])
    return _flops(instruction, shapes)


def _flops(instruction: Instruction, shapes: dict[str, str]) -> float:
    if instruction.library_call:
        return _library_flops(instruction, shapes)
    if instruction.opcode not in ("dot", "convolution"):
        return 0.0
    lhs, rhs = (array_shapes(shapes[name])[0][1] for name in instruction.operand_names[:2])
    output = array_shapes(instruction.shape)[0][1]
    if instruction.opcode == "dot":
        dims = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        return 2.0 * math.prod(output) * math.prod(lhs[int(i)] for i in dims[1].split(",") if i) if dims else 0.0
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if labels is None:
        return 0.0
    pairs = [
        _pairs(
            lhs[labels[1].index(i)], rhs[labels[2].index(i)], output[labels[3].index(i)],
            *(_window(instruction.attributes, name, int(i), default) for name, default in _WINDOW.items()),
        ) for i in labels[3] if i.isdigit()
    ]
    channels = rhs[labels[2].index("i")]
    return 2.0 * channels * math.prod(pairs) * output[labels[3].index("b")] * output[labels[3].index("f")]


def _library_flops(instruction: Instruction, shapes: dict[str, str]) -> float:
    """Return the FLOPs of a call of cuBLAS, or of cuDNN's attention or convolutions; 0 of other library calls."""
    if "fmha" in instruction.library_call:
        query, key = (dims for _, dims in array_shapes(operand_shapes(instruction))[:2])  # [batch, length, heads, dim]
        products = 5 if "Backward" in instruction.library_call else 2
        causal = 0.5 if re.search(r'"mask_type": *"[A-Z_]*CAUSAL', instruction.attributes) else 1.0
        return causal * products * 2.0 * math.prod(query) * key[1]
    if "conv" in instruction.library_call:
        labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.attributes)
        first, second = (array_shapes(shapes[name])[0][1] for name in instruction.operand_names[:2])
        result = array_shapes(instruction.shape)[0][1]
        outputs, kernel = result, second
        if "Backward" in instruction.library_call:
            outputs, kernel = (first, second) if "Input" in instruction.library_call else (second, result)
        return 2.0 * math.prod(outputs) * math.prod(kernel) / kernel[labels[1].index("o")] if labels else 0.0
    contracting = re.search(r'"lhs_contracting_dimensions": *\[([^\]]*)\]', instruction.attributes)
    if contracting is None:
        return 0.0
    lhs, output = array_shapes(shapes[instruction.operand_names[0]])[0][1], array_shapes(instruction.shape)[0][1]
    return 2.0 * math.prod(output) * math.prod(lhs[int(i)] for i in re.findall(r"\d+", contracting[1]))


def _window(attributes: str, name: str, dimension: int, default: int) -> int:
    """Return a field of a convolution's window in a spatial dimension: "pad=1_2x3_4" → 1 or 3, the padding before."""
    match = re.search(rf"window=\{{[^}}]*\b{name}=([\dx_-]+)", attributes)
    return int(match[1].split("x")[dimension].split("_")[0]) if match else default


@functools.cache
def _pairs(lhs: int, rhs: int, output: int, stride: int, pad: int, lhs_dilation: int, rhs_dilation: int) -> int:
    """Return the pairs of an output and a kernel position that multiply an element: neither padding nor a hole.

    The TPU compiler writes products with batch dimensions as convolutions in which most pairs multiply nothing.
    """
    at = np.arange(rhs)[:, None] * rhs_dilation - pad + np.arange(output) * stride
    return int(np.sum((at >= 0) & (at < lhs * lhs_dilation) & (at % lhs_dilation == 0)))


def hbm_bytes(module: Module) -> float:
    """Return the bytes that one run reads from HBM and writes to it, with the padding of tiled layouts.

    Collectives are left out, as they are in the estimate of a step's time.
    """
    total = 0.0
    for name, runs in module.executions(fused=False).items():
        shapes = {one.name: one.shape for one in module.computations[name]}
        total += runs * sum(instruction_bytes(module.computations, one, shapes) for one in module.computations[name])
    return total


def instruction_bytes(computations: Computations, instruction: Instruction, shapes: dict[str, str]) -> int:
    """Return the HBM traffic of one execution of a scheduled instruction.

    `shapes` are those of all instructions of its computation, with layouts.
    """
    opcode, operands = instruction.opcode, [shapes.get(name, "") for name in instruction.operand_names]
    is_call = opcode == "custom-call" and not instruction.is_kernel
    if opcode in _FREE or opcode.endswith("-done") or (is_call and not instruction.library_call):
        return 0
    if is_call:  # a result of bytes is workspace
        results = [part for part in elements(instruction.shape) if not part.startswith(("s8", "u8"))]
        return sum(map(placed_bytes, [*operands, *results]))
    if opcode in ("copy-start", "slice-start", "dynamic-slice-start"):
        return _start_bytes(instruction)
    if opcode in _SLICES:
        return _moved(instruction.shape, operands[0]) + placed_bytes(instruction.shape)
    if opcode == "dynamic-update-slice":
        return placed_bytes(operands[1]) + _moved(operands[1], instruction.shape)
    if opcode == "fusion":
        body = computations[next(instruction.called())]
        reads = sum(_read(computations, body, i, shape) for i, shape in enumerate(operands))
        return reads + _written(computations, body, instruction.shape)
    return sum(map(placed_bytes, operands)) + placed_bytes(instruction.shape)


def _start_bytes(instruction: Instruction) -> int:
    """Return the traffic of an asynchronous copy or slice."""
    first, second = elements(instruction.shape)[:2]
    if instruction.opcode == "copy-start":  # (copy, original, context)
        return placed_bytes(first) + placed_bytes(second)
    return _moved(second, first) + placed_bytes(second)  # ((original), slice, context)


def _read(computations: Computations, body: list[Instruction], index: int, shape: str) -> int:
    """Return the bytes that a fusion reads of its operand number `index`: slices, where nothing else uses it."""
    parameter = next((one for one in body if one.opcode == "parameter" and one.operands == str(index)), None)
    if parameter is None:
        return 0
    total = 0
    for user, position in _users(computations, body, parameter.name):
        if user.opcode in _SLICES and position == 0:
            total += _moved(user.shape, shape)
        elif user.opcode in ("tuple", *KINDS) or (user.opcode == "dynamic-update-slice" and position == 0):
            continue  # passed on, part of a collective, or updated in place
        elif user.opcode == "fusion":
            total += _read(computations, computations[next(user.called())], position, shape)
        else:
            return placed_bytes(shape)
    return min(total, placed_bytes(shape))


def _users(computations: Computations, body: list[Instruction], name: str) -> Iterator[tuple[Instruction, int]]:
    """Yield the instructions that use a value, or a bitcast of it, and the position of the operand."""
    for one in body:
        for position, operand in enumerate(one.operand_names):
            if operand == name and (_is_bitcast(computations, one) or _is_sliced_again(computations, body, one)):
                yield from _users(computations, body, one.name)
            elif operand == name:
                yield one, position


def _is_sliced_again(computations: Computations, body: list[Instruction], instruction: Instruction) -> bool:
    """Return whether an instruction is a slice of which only slices are read."""
    return instruction.opcode == "slice" and all(
        user.opcode in _SLICES and not position for user, position in _users(computations, body, instruction.name)
    )


def _is_bitcast(computations: Computations, instruction: Instruction) -> bool:
    """Return whether an instruction is a bitcast, or a fusion of nothing else."""
    if instruction.opcode != "fusion":
        return instruction.opcode == "bitcast"
    body = computations[next(instruction.called())]
    return all(one.opcode in ("parameter", "bitcast") for one in body)


def _written(computations: Computations, body: list[Instruction], shape: str) -> int:
    """Return the bytes that a fusion writes. Of a result that updates an operand in place, only the update counts."""
    definitions = {one.name: one for one in body}

    def source(name: str) -> Instruction:
        one = definitions[name]
        return source(one.operand_names[0]) if _is_bitcast(computations, one) else one

    root = source(body[-1].name)
    results = [source(name) for name in root.operand_names] if root.opcode == "tuple" else [root]
    parts = elements(shape)
    if len(parts) != len(results):
        return placed_bytes(shape)
    total = 0
    for result, part in zip(results, parts, strict=True):
        is_update = result.opcode == "dynamic-update-slice"
        if is_update and source(result.operand_names[0]).opcode == "parameter":
            total += _moved(definitions[result.operand_names[1]].shape, part)
        elif result.opcode not in ("parameter", "get-tuple-element", *KINDS):  # of an asynchronous collective
            total += placed_bytes(part)
    return total


def _moved(part: str, whole: str) -> int:
    """Return the bytes of a part of an array, given both shapes, if the array is in HBM."""
    return sum(_tiled_bytes(*array) for array in _ARRAY.findall(part)) if placed_bytes(whole) else 0


def placed_bytes(shape: str) -> int:
    """Return the bytes in HBM of the arrays of an HLO shape with layouts; S(1) is on-chip memory."""
    return sum(_tiled_bytes(*array) for array in _ARRAY.findall(shape) if not re.search(r"S\([1-9]", array[-1]))


def _tiled_bytes(dtype: str, dims: str, order: str, layout: str) -> int:
    """Return the bytes of an array with the padding of its tiles.

    For example, dtype "bf16", dims "8,512,64", order "2,1,0" from minor to major or "" for the default, layout
    ":T(8,128)(2,1)".
    """
    sizes = [int(n) for n in dims.split(",") if n]
    minor = [int(n) for n in order.split(",") if n] or list(range(len(sizes)))[::-1]
    tile = re.search(r"T\((\d+(?:,\d+)*)\)", layout)
    for dimension, step in zip(minor, [int(n) for n in tile[1].split(",")][::-1] if tile else [], strict=False):
        sizes[dimension] = -(-sizes[dimension] // step) * step
    return math.prod(sizes) * BITS.get(dtype, 0) // 8  # tokens have no size
