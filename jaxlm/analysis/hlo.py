"""Parser of compiled HLO text (`compiled.as_text()`): instructions, execution counts and collectives."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
"""Opcodes of collectives."""
BETWEEN_SLICES = " between slices"
"""End of the kind of a transfer over the network that joins slices, such as "all-reduce between slices"."""
CONTROL_FLOW = ("while", "call", "conditional", "async-start")
"""Opcodes whose called computations are scheduled instruction by instruction, like the entry computation."""

BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64, "u64": 64,
    "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128,
}
"""Bits of an element by HLO type."""
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_COMPUTATION_END = re.compile(r"^\}(?:$| //|, execution_thread)")
_INSTRUCTION_START = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = ")
_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>\(.*?\)|\S+) (?P<opcode>[a-z][\w\-]*)"
    r"\((?P<operands>[^)]*)\)(?P<attributes>.*)$", re.DOTALL
)
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|false_computation)=%?([\w.\-]+)")
_TRUE_BRANCH = re.compile(r"true_computation=%?([\w.\-]+)")
_BRANCHES = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_UNKNOWN_CYCLES = 10**12  # without an estimate the compiler writes a number near 2**63


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One HLO instruction: `name = shape opcode(operands), attributes`."""

    name: str
    shape: str
    opcode: str
    operands: str
    attributes: str

    @functools.cached_property
    def op_name(self) -> str:
        """JAX operation of the instruction, with its name scopes; "" if unknown."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match[1] if match else ""

    @functools.cached_property
    def cycles(self) -> int:
        """The TPU compiler's `estimated_cycles` of one execution; 0 without an estimate."""
        match = _CYCLES.search(self.attributes)
        cycles = int(match[1]) if match else 0
        return cycles if cycles < _UNKNOWN_CYCLES else 0

    @functools.cached_property
    def operand_names(self) -> list[str]:
        """Names of the instructions whose values are read."""
        return re.findall(r"%([\w.\-]+)", self.operands)

    @property
    def is_kernel(self) -> bool:
        """Whether the instruction is a Mosaic kernel (`pallas_call` on TPU), which has no estimated cycles."""
        return self.opcode == "custom-call" and 'custom_call_target="tpu_custom_call"' in self.attributes

    @property
    def library_call(self) -> str:
        """Name of the GPU library's function that the instruction calls, such as "__cublas$lt$matmul"; "" for none."""
        if self.opcode != "custom-call":
            return ""
        match = re.search(r'custom_call_target="(__cu[^"]+)"', self.attributes)
        return match[1] if match else ""

    def called(self) -> Iterator[str]:
        """Yield the names of the computations that the instruction calls; of a conditional in the order 0, 1, …."""
        if "=%" in self.attributes or "={" in self.attributes:
            yield from _CALLED.findall(self.attributes)
            yield from _TRUE_BRANCH.findall(self.attributes)
            for group in _BRANCHES.findall(self.attributes):
                yield from re.findall(r"[\w.\-]+", group)


@dataclasses.dataclass(frozen=True)
class Module:
    """Compiled HLO module.

    Attributes:
        entry: Name of the entry computation.
        computations: Instructions of each computation, in scheduled order.
    """

    entry: str
    computations: dict[str, list[Instruction]]

    def kernels(self) -> dict[str, int]:
        """Return how often one run executes each Pallas kernel and each function of a library, by name."""
        totals: dict[str, int] = {}
        for computation, runs in self.executions(fused=False).items():
            for one in self.computations[computation]:
                if name := one.library_call or (one.is_kernel and one.name.partition(".")[0]):
                    totals[name] = totals.get(name, 0) + runs
        return totals

    def executions(self, fused: bool) -> dict[str, int]:
        """Return how often each computation runs in one run of the module.

        Of a conditional only the first branch counts: jax.lax.cond has the rare case as its second.

        With `fused`, calls of fusions and reductions are followed too, whose instructions have no time of their own.
        """
        runs: dict[str, int] = {}

        def visit(name: str, times: int) -> None:
            runs[name] = runs.get(name, 0) + times
            for instruction in self.computations[name]:
                if not fused and instruction.opcode not in CONTROL_FLOW:
                    continue
                called_by = list(instruction.called())
                for called in called_by[:1] if instruction.opcode == "conditional" else called_by:
                    if called in self.computations:
                        visit(called, times * self.trip_count(instruction))

        visit(self.entry, 1)
        return runs

    def trip_count(self, instruction: Instruction) -> int:
        """Return the number of iterations of a while loop; 1 for other instructions.

        Without the compiler's `known_trip_count` it is the largest constant of the loop's condition, which is right for
        loops that count from zero by one, such as jax.lax.scan.
        """
        if instruction.opcode != "while":
            return 1
        if match := re.search(r"known_trip_count\D*(\d+)", instruction.attributes):
            return int(match[1])
        condition = re.search(r"condition=%?([\w.\-]+)", instruction.attributes)
        pending = [condition[1]] if condition else []
        bounds = [1]
        while pending:
            for other in self.computations.get(pending.pop(), ()):
                if other.opcode == "constant" and other.operands.isdigit():
                    bounds.append(int(other.operands))
                pending += other.called()
        return max(bounds)


def parse(hlo: str) -> Module:
    """Parse the text of a compiled module."""
    computations: dict[str, list[Instruction]] = {}
    entry, current, lines = "", None, []

    def finish() -> None:
        if lines and current is not None and (match := _INSTRUCTION.match("\n".join(lines))):
            current.append(Instruction(**match.groupdict()))
        lines.clear()

    for line in hlo.splitlines():
        if current is None:
            if match := _COMPUTATION.match(line):
                current = computations[match[2]] = []
                entry = match[2] if match[1] else entry
        elif _COMPUTATION_END.match(line):
            finish()
            current = None
        else:
            if _INSTRUCTION_START.match(line):
                finish()
            lines.append(line)  # attributes of kernels span several lines
    return Module(entry, computations)


def array_shapes(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return (dtype, dimensions) of each array in an HLO shape or tuple of shapes."""
    return [
        (dtype, tuple(int(n) for n in dims.split(",") if n))
        for dtype, dims in _ARRAY.findall(re.sub(r"\{[^}]*\}", "", shape)) if dtype in BITS
    ]


def array_bytes(shape: str) -> list[int]:
    """Return the bytes, without padding, of each array in an HLO shape or tuple of shapes."""
    return [math.prod(dims) * BITS[dtype] // 8 for dtype, dims in array_shapes(shape)]


def operand_shapes(kernel: Instruction) -> str:
    """Return the shapes of a kernel's operands, with commas between them."""
    match = re.search(r"operand_layout_constraints=\{(.*?\})\}", kernel.attributes, re.DOTALL)
    return match[1] if match else ""


class Collective(NamedTuple):
    """One collective operation of a compiled program.

    Attributes:
        kind: Opcode, with BETWEEN_SLICES for a transfer over the network that joins slices.
        bytes: Bytes of the full arrays: outputs, or inputs of a reduce-scatter.
        runs: Number of executions in one run of the program.
        window: Seconds of compute that run at the same time; infinite where only is known that some do.
        group: Partition ids of the first of its groups of devices; () for all devices.
    """

    kind: str
    bytes: int
    runs: int
    window: float
    group: tuple[int, ...] = ()


class Traffic(NamedTuple):
    """Total of one kind of collectives in one run of a program, on one device.

    Attributes:
        count: Number of executions.
        bytes: Bytes of the full arrays: outputs, or inputs of a reduce-scatter.
        asynchronous_count: Number of executions that overlap with compute.
        asynchronous_bytes: Bytes of those.
        seconds: Time over the links; 0 where their bandwidth is not known.
        asynchronous_seconds: Time of those that overlap with compute.
    """

    count: int = 0
    bytes: int = 0
    asynchronous_count: int = 0
    asynchronous_bytes: int = 0
    seconds: float = 0.0
    asynchronous_seconds: float = 0.0


def cycles_window(instruction: Instruction) -> float:
    """Return infinity for compute on a TPU, where cycles and kernels tell it, and 0 for other instructions."""
    is_compute = instruction.cycles or instruction.is_kernel or instruction.opcode in CONTROL_FLOW
    return math.inf if is_compute else 0.0


def traffic(
    module: Module, seconds: Callable[[Collective], float] = lambda collective: 0.0,
    compute: Callable[[Instruction], float] = cycles_window,
) -> dict[str, Traffic]:
    """Return the totals of each kind of collectives, trip counts of loops included, largest first.

    `seconds` returns the time of one execution, `compute` that of the compute that can hide a collective.
    """
    totals: dict[str, Traffic] = {}
    for one in collectives(module, compute):
        time, hidden = seconds(one), int(one.window > 0)
        item = (1, one.bytes, hidden, hidden * one.bytes, time, min(time, one.window))
        item = [one.runs * figure for figure in item]
        totals[one.kind] = Traffic(*map(sum, zip(totals.get(one.kind, Traffic()), item, strict=True)))
    return dict(sorted(totals.items(), key=lambda item: -item[1].bytes))


def asynchronous_share(totals: dict[str, Traffic]) -> float | None:
    """Return the share of the collectives' bytes that overlaps with compute; None without collectives."""
    size = sum(item.bytes for item in totals.values())
    return sum(item.asynchronous_bytes for item in totals.values()) / size if size else None


def collectives(
    module: Module, compute: Callable[[Instruction], float] = cycles_window
) -> Iterable[Collective]:
    """Return every collective of a module once.

    A collective overlaps with compute if compute is scheduled between its start and its end, or if the TPU compiler
    fused one of its steps into a computation that has cycles ("asynchronous collective fusion"). The frontend attribute
    async_collective_name is no evidence: the compiler keeps it on collectives that it made synchronous again.
    """
    found: dict[tuple[str, str], Collective] = {}
    fused_with_compute = {
        called for instructions in module.computations.values() for caller in instructions
        for called in caller.called() if caller.opcode == "fusion" and caller.cycles and "async_collective" in called
    }
    for name, runs in module.executions(fused=True).items():
        instructions = module.computations[name]
        for index, instruction in enumerate(instructions):
            kind = next((kind for kind in KINDS if instruction.opcode in (kind, f"{kind}-start")), None)
            if instruction.opcode == "send" and (sent := re.search(r'transfer_type="(\w+)"', instruction.attributes)):
                kind = sent[1].lower().replace("_", "-") + BETWEEN_SLICES
            if kind is None:
                continue
            window = math.inf if name in fused_with_compute else _window(instructions, index, compute)
            # On TPUs a reduce-scatter is a fusion of an all-reduce and slices; all reduce-scatters share one channel.
            scatters = name.startswith("all-reduce-scatter")
            channel = None if scatters else re.search(r"channel_id=(\d+)", instruction.attributes)
            # The TPU compiler repeats an asynchronous collective in each of several fusions.
            key = (kind, channel[1]) if channel else (name, instruction.name)
            if key not in found:
                size, group = _collective_bytes(kind, instruction), _first_group(instruction.attributes)
                found[key] = Collective("reduce-scatter" if scatters else kind, size, runs, window, group)
            before = found[key]
            found[key] = before._replace(runs=max(runs, before.runs), window=max(window, before.window))
    return found.values()


def _window(instructions: list[Instruction], index: int, compute: Callable[[Instruction], float]) -> float:
    """Return the time of compute that is scheduled between the collective that starts at `index` and its end."""
    start = instructions[index]
    if start.opcode != "send" and not start.opcode.endswith("-start"):
        return 0.0
    done, total = f"{start.opcode.removesuffix('-start')}-done", 0.0
    for other in instructions[index + 1:]:
        if other.opcode == done and start.name in re.findall(r"[\w.\-]+", other.operands):
            return total
        total += compute(other)
    return total


def _collective_bytes(kind: str, instruction: Instruction) -> int:
    """Return the bytes of the full arrays: the output of most collectives, the input of a reduce-scatter."""
    groups = elements(instruction.shape)
    if instruction.opcode == "send":  # (operand, context, token)
        return sum(array_bytes(groups[0]))
    if instruction.opcode.endswith("-start") and len(groups) > 1 and kind != "all-reduce":
        # The result of a start is (operands, results, contexts), each an array or a tuple.
        return sum(array_bytes(groups[0 if kind == "reduce-scatter" else 1]))
    size = sum(array_bytes(instruction.shape))
    return size * len(_first_group(instruction.attributes) or (0,)) if kind == "reduce-scatter" else size


def elements(shape: str) -> list[str]:
    """Return the elements of an HLO tuple, which may be tuples; an array is its own only element."""
    shape = re.sub(r"/\*.*?\*/", "", shape).strip()
    if not shape.startswith("("):
        return [shape]
    depth, found = 0, [""]
    for char in shape[1:-1]:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and not depth:
            found.append("")
        else:
            found[-1] += char
    return [element.strip() for element in found]


def _first_group(attributes: str) -> tuple[int, ...]:
    """Return the partition ids of a collective's first group of devices, from any of HLO's notations.

    Of a permutation it is the first pair of different devices: a device may also send to itself.
    """
    if match := re.search(r"source_target_pairs=\{([\d,{}]+)\}", attributes):
        pairs = [(int(source), int(target)) for source, target in re.findall(r"(\d+),(\d+)", match[1])]
        return next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])
    mesh = r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?\s*\{([^}]*)\}"
    if match := re.search(mesh, attributes):
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", match[1])}
        chosen = re.findall(r"'(\w+)'", match[4])
        ids = _device_ids(match[2] or str(math.prod(sizes.values())), match[3]).reshape(tuple(sizes.values()))
        index = tuple(slice(None) if axis in chosen else 0 for axis in sizes)
        return tuple(ids[index].ravel().tolist())
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        return tuple(_device_ids(match[3], match[4]).ravel()[: int(match[2])].tolist())
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return tuple(int(n) for n in match[1].split(","))
    return ()


def _device_ids(dims: str, order: str | None) -> np.ndarray:
    """Return the partition ids of HLO's "[2,8]T(1,0)": an iota of these dimensions, transposed."""
    sizes = [int(n) for n in dims.split(",")]
    axes = [int(n) for n in order.split(",")] if order else range(len(sizes))
    return np.arange(math.prod(sizes)).reshape(sizes).transpose(axes)
