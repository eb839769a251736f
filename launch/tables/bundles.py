"""Cycles of a Mosaic kernel, from the instruction bundles that the TPU compiler schedules for it.

A TPU core issues one bundle a cycle. The compiler can write a kernel's final bundles as text, with its loops over the
grid, its branches and the scalar instructions that decide them. `count` executes these scalar instructions, and only
them, and counts the bundles on the way. Waits for memory are not counted.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
import operator
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

MAX_STEPS = 5_000_000
"""Executed instructions after which the count gives up."""

_BUNDLE = re.compile(r"^\s*(?:0x)?[0-9a-f]+\s+(?:[A-Z]{2})?\s*:\s*(?:>\s*)*(?=\{)", re.MULTILINE)
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
_INSTRUCTION = re.compile(r"%(\w+) = ([a-z][\w.]*)\s*(.*)", re.DOTALL)
_BRANCH = re.compile(r"sbr\.rel (?:\((!?)%(\w+)\) )?target = \$region(\d+)")
_PREDICATE = re.compile(r"\((!?)%(\w+)(?:, (%\w+))?\),?\s*")
_SPILL = re.compile(r"\[smem:\[#(\w+_spill)\]\]")
_OPERAND = re.compile(r"%(\w+)|(?<![\w.#])(-?\d+)(?![\w.])")

Value = int | bool | None  # None: not known, such as an element of an array


class Work(NamedTuple):
    """Work of a kernel.

    Attributes:
        cycles: Number of bundles.
        rows: Rows fed to all matrix units together; each is a product with one full tile of weights, width × width.
    """

    cycles: int
    rows: int


class Count(NamedTuple):
    """Work of one execution of a kernel on one core.

    Attributes:
        certain: Work that does not depend on data.
        conditional: Work behind branches that depend on data, such as the blocks that an attention mask skips, as if
            none were skipped.
    """

    certain: Work
    conditional: Work


class _Operation(NamedTuple):
    """A scalar instruction: result = function(operands), if the predicate holds."""

    result: str
    function: Callable[..., Value]
    operands: tuple[str | int, ...]
    predicate: str | None
    is_negated: bool


class _Branch(NamedTuple):
    """A jump to the bundle `target` if the predicate holds; None for always."""

    predicate: str | None
    is_negated: bool
    target: int

    def is_taken(self, values: dict[str, Value]) -> bool | None:
        """Return whether the branch is taken; None if that is not known."""
        if self.predicate is None:
            return True
        condition = values.get(self.predicate)
        return None if condition is None else bool(condition) != self.is_negated


@dataclasses.dataclass
class _Bundle:
    """The scalar instructions of a bundle that branches depend on, its branch, and the rows that it multiplies."""

    operations: list[_Operation]
    rows: int
    branch: _Branch | None = None


def count(text: str, delay_slots: int = 4) -> Count:
    """Count the work of a kernel.

    Args:
        text: The compiler's dump of the kernel's final bundles.
        delay_slots: Number of bundles after a branch that run before it takes effect.

    Raises:
        ValueError: The dump has no bundles, a loop's trip count depends on data, or the count takes too long.
    """
    bundles = _parse(text, delay_slots)
    stops = [i for i, bundle in enumerate(bundles) if bundle.operations or bundle.branch] + [len(bundles) - 1]
    values: dict[str, Value] = {}
    executed: collections.Counter[tuple[int, int]] = collections.Counter()  # (first bundle, end) → executions
    conditional: collections.Counter[tuple[int, int]] = collections.Counter()
    region = range(0)  # the bundles behind the latest branch that depends on data
    position = steps = 0
    while position < len(bundles):
        stop = stops[bisect.bisect_left(stops, position)]
        executed[position, stop + 1] += 1
        if position in region:
            conditional[position, min(stop + 1, region.stop)] += 1
        position, bundle = stop + 1, bundles[stop]
        steps += 1 + len(bundle.operations)
        if steps > MAX_STEPS:
            raise ValueError("the kernel has too many steps")
        _execute(bundle.operations, values)
        if bundle.branch is None:
            continue
        is_taken = bundle.branch.is_taken(values)
        if is_taken:
            position = bundle.branch.target
        elif is_taken is None and bundle.branch.target < position:
            raise ValueError("the trip count of a loop depends on data")
        elif is_taken is None and not (position in region and bundle.branch.target <= region.stop):
            region = range(position, bundle.branch.target)
    executed.subtract(conditional)
    rows = [0, *itertools.accumulate(bundle.rows for bundle in bundles)]
    return Count(*(
        Work(
            sum(times * (end - start) for (start, end), times in spans.items()),
            sum(times * (rows[end] - rows[start]) for (start, end), times in spans.items()),
        ) for spans in (executed, conditional)
    ))


def _parse(text: str, delay_slots: int) -> list[_Bundle]:
    starts = [match.start() for match in _BUNDLE.finditer(text)]
    if not starts:
        raise ValueError("the dump has no bundles")
    bodies = [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]
    regions = {int(number): i for i, body in enumerate(bodies) for number in _REGION.findall(body)}
    codes = [re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL) for body in bodies]
    instructions = [list(_scalar_instructions(code)) for code in codes]
    branches = [(i, *match.groups()) for i, code in enumerate(codes) for match in _BRANCH.finditer(code)]
    needed = _needed([one for bundle in instructions for one in bundle], {name for _, _, name, _ in branches if name})
    bundles = [
        _Bundle([_operation(*one) for one in scalar if one[0] in needed and one[1] != "sphi"], _rows(code))
        for scalar, code in zip(instructions, codes, strict=True)
    ]
    for index, negation, name, region in branches:
        # The predicate's register may change before the branch takes effect, so it is kept in one of its own.
        latch = f"branch {index}" if name else None
        if name:
            bundles[index].operations.append(_Operation(latch, _same, (_register(name),), None, False))
        # Without a bundle of its own, the region is the end of the kernel.
        target = regions.get(int(region), len(bundles))
        bundles[min(index + delay_slots, len(bundles) - 1)].branch = _Branch(latch, bool(negation), target)
    return bundles


def _rows(code: str) -> int:
    """Return the rows that the matrix units multiply: a vector register has 8 rows of 32 bits, or 16 of 16."""
    widths = re.findall(r"= vmatmul\.(?:\w+\.)*?[a-z]+(\d+)", code)
    return sum(8 * 32 // int(width) for width in widths)


def _scalar_instructions(code: str) -> Iterator[tuple[str, str, str]]:
    """Yield (result, opcode, operands) of the scalar instructions of a bundle; a spilled value's slot is a result."""
    for part in code.rstrip().rstrip("}").split(";;"):
        match = _INSTRUCTION.search(part)
        if match is None:
            continue
        name, opcode, operands = match.groups()
        if opcode == "sst" and (slot := _SPILL.search(operands)):
            yield slot[1], opcode, operands.replace(slot[0], "")
        elif re.match(r"[sp]\d", name) and opcode != "int_to_ptr":
            yield name, opcode, operands


def _needed(instructions: list[tuple[str, str, str]], names: set[str]) -> set[str]:
    """Return all results that the results `names` depend on."""
    sources = collections.defaultdict(set)
    for result, opcode, operands in instructions:
        if opcode == "sld":
            sources[result].update(_SPILL.findall(operands))
        else:
            sources[result].update(re.findall(r"%(\w+)", operands))
    found: set[str] = set()
    pending = list(names)
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += sources[name]
    return found


def _register(name: str) -> str:
    """Return the machine register of a value: "s12" of "s546_s12"; both ends of a loop variable share one."""
    return name if name.endswith("_spill") else name.rpartition("_")[2]


def _operation(result: str, opcode: str, operands: str) -> _Operation:
    predicate, is_negated = None, False
    match = _PREDICATE.match(operands)
    if match and match[3]:  # a move "(%p, %if_false), if_true"
        chosen = [operands[match.end():], match[3]]
        opcode, operands = "scalar_select", ", ".join([f"%{match[2]}", *(chosen[::-1] if match[1] else chosen)])
    elif match:
        predicate, is_negated = _register(match[2]), bool(match[1])
        operands = operands[match.end():]
    if opcode == "sld":
        slot = _SPILL.search(operands)
        function, names = (_same, (slot[1],)) if slot else (_unknown, ())
    else:
        function = _function(opcode)
        names = tuple(
            _register(name) if name else _signed(int(number)) for name, number in _OPERAND.findall(operands)
        )
    return _Operation(_register(result), function, names, predicate, is_negated)


def _execute(operations: list[_Operation], values: dict[str, Value]) -> None:
    """Execute the operations of a bundle, which all read the registers as they were before it."""
    results = []
    for operation in operations:
        condition = True
        if operation.predicate is not None:
            condition = values.get(operation.predicate)
            if condition is not None and bool(condition) == operation.is_negated:
                continue
        inputs = [values.get(name) if isinstance(name, str) else name for name in operation.operands]
        results.append((operation.result, None if condition is None else operation.function(*inputs)))
    values.update(results)


def _same(value: Value) -> Value:
    return value


def _unknown(*_: Value) -> Value:
    return None


def _and(a: Value, b: Value) -> Value:
    if a is None or b is None:
        return False if False in (a, b) else None
    return bool(a) and bool(b)


def _not(a: Value) -> Value:
    return None if a is None else not a


def _or(a: Value, b: Value) -> Value:
    return _not(_and(_not(a), _not(b)))


def _select(condition: Value, on_true: Value, on_false: Value) -> Value:
    return None if condition is None else on_true if condition else on_false


_LOGIC: dict[str, Callable[..., Value]] = {
    "smov": _same, "pmov": _same, "sst": _same, "scalar_select": _select, "pneg": _not, "pand": _and, "por": _or,
    "pnand": lambda a, b: _not(_and(a, b)), "pnor": lambda a, b: _not(_or(a, b)),
}
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "sadd": operator.add, "ssub": operator.sub, "smul": operator.mul, "sand": operator.and_, "sor": operator.or_,
    "sxor": operator.xor, "smin": min, "smax": max, "sshll": lambda a, b: a << (b & 31),
    "sshra": lambda a, b: a >> (b & 31), "sshrl": lambda a, b: (a & 0xFFFFFFFF) >> (b & 31),
}


def _function(opcode: str) -> Callable[..., Value]:
    """Return the function of an opcode, such as "sadd.s32" or "scmp.ge.s32.totalorder"."""
    name, *suffixes = opcode.split(".")
    if name in _LOGIC:
        return _LOGIC[name]
    if name == "scmp" and suffixes[1] in ("s32", "u32"):
        function, is_arithmetic = getattr(operator, suffixes[0]), False
    elif name in _ARITHMETIC:
        function, is_arithmetic = _ARITHMETIC[name], True
    else:
        return _unknown
    mask = 0xFFFFFFFF if "u32" in suffixes and (name in ("scmp", "smin", "smax")) else -1

    def evaluate(a: Value, b: Value) -> Value:
        if a is None or b is None:
            return None
        result = function(a & mask, b & mask)
        return _signed(result) if is_arithmetic else result

    return evaluate


def _signed(value: int) -> int:
    """Return the signed 32-bit number with the same bits."""
    return (value + 2**31) % 2**32 - 2**31
