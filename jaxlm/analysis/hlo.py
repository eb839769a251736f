"""Parser of compiled HLO text (`compiled.as_text()`): instructions, how often each runs, and collectives."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
"""The collective operations that are counted."""
CONTROL_FLOW = ("while", "call", "conditional", "async-start")
"""Opcodes whose called computations are scheduled like the entry's, instruction by instruction."""

_BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64, "u64": 64,
    "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128,
}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_COMPUTATION_END = re.compile(r"^\}(?:$| //|, execution_thread)")
_INSTRUCTION_START = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = ")
_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>\(.*?\)|\S+) (?P<opcode>[a-z][\w\-]*)"
    r"\((?P<operands>[^)]*)\)(?P<attributes>.*)$", re.DOTALL
)
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_UNKNOWN_CYCLES = 10**12  # the compiler writes a number near 2**63 where it has no estimate


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
        """The JAX operation that the instruction comes from, with the name scopes around it; "" if not stated."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match[1] if match else ""

    @functools.cached_property
    def cycles(self) -> int:
        """The TPU compiler's `estimated_cycles` of one execution, 0 where it gives none."""
        match = _CYCLES.search(self.attributes)
        cycles = int(match[1]) if match else 0
        return cycles if cycles < _UNKNOWN_CYCLES else 0

    @property
    def is_kernel(self) -> bool:
        """Whether this is a Mosaic kernel (`pallas_call` on TPU), which has no estimated cycles."""
        return self.opcode == "custom-call" and 'custom_call_target="tpu_custom_call"' in self.attributes

    def called(self) -> Iterator[str]:
        """Names of the computations that this instruction calls."""
        if "=%" in self.attributes or "={" in self.attributes:
            yield from _CALLED.findall(self.attributes)
            for group in _BRANCHES.findall(self.attributes):
                yield from re.findall(r"[\w.\-]+", group)


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled HLO module. computations: instructions in scheduled order, by the computation's name."""

    entry: str
    computations: dict[str, list[Instruction]]

    def executions(self, fused: bool, loops: bool = True) -> dict[str, int]:
        """How often each computation runs in one run of the module.

        fused: also follow the calls of fusions and reductions, whose instructions carry no time of their own.
        loops: multiply by trip counts; if False, count a loop's body once. Every branch of a conditional counts.
        """
        runs: dict[str, int] = {}

        def visit(name: str, times: int) -> None:
            runs[name] = runs.get(name, 0) + times
            for instruction in self.computations[name]:
                if not fused and instruction.opcode not in CONTROL_FLOW:
                    continue
                trips = self.trip_count(instruction) if loops else 1
                for called in instruction.called():
                    if called in self.computations:
                        visit(called, times * trips)

        visit(self.entry, 1)
        return runs

    def trip_count(self, instruction: Instruction) -> int:
        """Trips of a while loop: the compiler's `known_trip_count`, else the largest constant of the loop's condition
        (which is right for loops that count up from zero by one, as jax.lax.scan does), else 1."""
        if instruction.opcode != "while":
            return 1
        if match := re.search(r"known_trip_count\D*(\d+)", instruction.attributes):
            return int(match[1])
        condition = re.search(r"condition=%?([\w.\-]+)", instruction.attributes)
        pending = [condition[1]] if condition else []
        bounds = [1]
        while pending:
            for one in self.computations.get(pending.pop(), ()):
                if one.opcode == "constant" and one.operands.isdigit():
                    bounds.append(int(one.operands))
                pending += one.called()
        return max(bounds)


def parse(hlo: str) -> Module:
    """The module that the text of a compiled program describes."""
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
            lines.append(line)  # an attribute of a kernel may span several lines
    return Module(entry, computations)


def array_shapes(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """(dtype, dimensions) of each array in an HLO shape or tuple of shapes."""
    return [
        (dtype, tuple(int(n) for n in dims.split(",") if n))
        for dtype, dims in _ARRAY.findall(re.sub(r"\{[^}]*\}", "", shape)) if dtype in _BITS
    ]


def array_bytes(shape: str) -> list[int]:
    """Bytes of each array in an HLO shape or tuple of shapes, without padding."""
    return [math.prod(dims) * _BITS[dtype] // 8 for dtype, dims in array_shapes(shape)]


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one kind in one run of a program, on one device.

    count: how often they run; bytes: the sizes of their full arrays (outputs; of a reduce-scatter, inputs).
    The `asynchronous` ones are those that overlap with compute.
    """

    count: int = 0
    bytes: int = 0
    asynchronous_count: int = 0
    asynchronous_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program. runs: executions in one run; overlaps: whether compute runs at the same time."""

    kind: str
    bytes: int
    runs: int
    overlaps: bool
    shape: str
    op_name: str


def traffic(module: Module) -> dict[str, Traffic]:
    """Collectives by kind, those inside loops times the loops' trip counts; largest first."""
    totals: dict[str, Traffic] = {}
    for one in collectives(module):
        size = one.runs * one.bytes
        item = Traffic(one.runs, size, *((one.runs, size) if one.overlaps else (0, 0)))
        totals[one.kind] = totals.get(one.kind, Traffic()) + item
    return dict(sorted(totals.items(), key=lambda item: -item[1].bytes))


def asynchronous_share(totals: dict[str, Traffic]) -> float | None:
    """Share of the collectives' bytes that overlaps with compute; None without collectives."""
    size = sum(item.bytes for item in totals.values())
    return sum(item.asynchronous_bytes for item in totals.values()) / size if size else None


def collectives(module: Module) -> list[Collective]:
    """Every collective of a module, each once.

    It overlaps with compute if compute is scheduled between its start and its end, or if the TPU compiler fused one of
    its steps into a computation with cycles of its own ("asynchronous collective fusion"). The frontend attribute
    async_collective_name alone says nothing: the compiler leaves it on those that it made synchronous again.
    """
    found: dict[tuple[str, str], Collective] = {}
    fused_with_compute = {
        called for instructions in module.computations.values() for one in instructions
        for called in one.called() if one.opcode == "fusion" and one.cycles and "async_collective" in called
    }
    for name, runs in module.executions(fused=True).items():
        instructions = module.computations[name]
        for index, instruction in enumerate(instructions):
            kind = next((kind for kind in KINDS if instruction.opcode in (kind, f"{kind}-start")), None)
            if kind is None:
                continue
            overlaps = name in fused_with_compute or _overlaps(instructions, index)
            # On TPUs a reduce-scatter is a fusion of an all-reduce and slices; all of them share one channel.
            scatters = name.startswith("all-reduce-scatter")
            one = Collective(
                kind="reduce-scatter" if scatters else kind, bytes=_collective_bytes(kind, instruction), runs=runs,
                overlaps=overlaps, shape=_without_layouts(instruction.shape), op_name=instruction.op_name,
            )
            channel = None if scatters else re.search(r"channel_id=(\d+)", instruction.attributes)
            # The TPU compiler spreads an asynchronous collective over several fusions, each of which repeats it whole.
            key = (kind, channel[1]) if channel else (name, instruction.name)
            if before := found.get(key):
                one = dataclasses.replace(
                    before, runs=max(runs, before.runs), overlaps=one.overlaps or before.overlaps
                )
            found[key] = one
    return list(found.values())


def _overlaps(instructions: list[Instruction], index: int) -> bool:
    """Whether compute is scheduled between the asynchronous collective that starts at `index` and its end."""
    start = instructions[index]
    if not start.opcode.endswith("-start"):
        return False
    done = start.opcode.replace("-start", "-done")
    for one in instructions[index + 1:]:
        if one.opcode == done and start.name in re.findall(r"[\w.\-]+", one.operands):
            return False
        if one.cycles or one.is_kernel or one.opcode in CONTROL_FLOW:
            return True
    return False


def _collective_bytes(kind: str, instruction: Instruction) -> int:
    """Bytes of the full arrays: the output of most collectives, the input of a reduce-scatter."""
    groups = _elements(instruction.shape)
    if instruction.opcode.endswith("-start") and len(groups) > 1 and kind != "all-reduce":
        # The result of a start is (operands, results, contexts), each of them one array or a tuple of several.
        return sum(array_bytes(groups[0 if kind == "reduce-scatter" else 1]))
    size = sum(array_bytes(instruction.shape))
    return size * _group_size(instruction.attributes) if kind == "reduce-scatter" else size


def _without_layouts(shape: str) -> str:
    return re.sub(r"\{[^}]*\}|/\*.*?\*/", "", shape)


def _elements(shape: str) -> list[str]:
    """The elements of an HLO tuple, each whole if it is a tuple itself; of an array's shape, itself."""
    shape = _without_layouts(shape)
    if not shape.startswith("("):
        return [shape]
    depth, elements = 0, [""]
    for char in shape[1:-1]:
        depth += (char in "([") - (char in ")]")
        if char == "," and not depth:
            elements.append("")
        else:
            elements[-1] += char
    return elements


def _group_size(attributes: str) -> int:
    """Devices in a replica group, from any of the forms in which HLO writes replica groups."""
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", attributes):
        axes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
        return math.prod(int(axes[axis]) for axis in re.findall(r"'(\w+)'", match[2]))
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
        return int(match[1])
    if match := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return len(match[1].split(","))
    return 1
