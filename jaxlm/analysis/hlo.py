"""What a compiled program sends between devices, read from its HLO text."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64, "u64": 64,
    "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128,
}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%?[\w.\-]+ = (?P<shape>\(.*?\)|\S+) (?P<kind>[a-z][\w\-]*)\((?P<operands>[^)]*)\)(?P<rest>.*)$"
)
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Traffic:
    """One kind of collective in one run of a program, on one device.

    count: how often it runs; bytes: the sizes of the whole arrays that come out of it (of a reduce-scatter: go in);
    the `asynchronous` ones run beside other work, so that their time may be hidden.
    """

    count: int = 0
    bytes: int = 0
    asynchronous_count: int = 0
    asynchronous_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program: where it comes from in the source, and how many times it runs."""

    kind: str
    bytes: int
    runs: int
    asynchronous: bool
    shape: str
    origin: str


def traffic(hlo: str) -> dict[str, Traffic]:
    """Collectives by kind, those inside loops times the loops' trip counts."""
    totals: dict[str, Traffic] = {}
    for one in collectives(hlo):
        size = one.runs * one.bytes
        item = Traffic(one.runs, size, *((one.runs, size) if one.asynchronous else (0, 0)))
        totals[one.kind] = totals.get(one.kind, Traffic()) + item
    return dict(sorted(totals.items(), key=lambda item: -item[1].bytes))


def collectives(hlo: str) -> list[Collective]:
    """Every collective of a compiled module, from `compiled.as_text()`."""
    entry, computations = _computations(hlo)
    runs = _runs(entry, computations)
    found: dict[tuple[str, str], Collective] = {}
    for name, lines in computations.items():
        if not runs.get(name):
            continue
        for line in lines:
            one = _collective(line, runs[name], name)
            if one is None:
                continue
            channel = re.search(r"channel_id=(\d+)", line)
            # TPU's compiler spreads an asynchronous collective over several fusions, each of which repeats it whole.
            key = (one.kind, channel[1]) if channel else (name, line)
            if key in found:
                one = dataclasses.replace(found[key], runs=max(one.runs, found[key].runs), asynchronous=True)
            found[key] = one
    return list(found.values())


def _collective(line: str, runs: int, computation: str) -> Collective | None:
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    kind = next((kind for kind in KINDS if match["kind"] in (kind, f"{kind}-start")), None)
    if kind is None:
        return None
    started = match["kind"].endswith("-start")
    groups = _elements(match["shape"])
    if started and len(groups) > 1 and kind != "all-reduce":
        # The result of a start is (operands, results, contexts), each of them one array or a tuple of several.
        sizes = _arrays(groups[0 if kind == "reduce-scatter" else 1])
    else:
        sizes = _arrays(match["shape"])
        if kind == "reduce-scatter":
            group = _group_size(match["rest"])
            sizes = [size * group for size in sizes]
    origin = re.search(r'op_name="([^"]*)"', match["rest"])
    return Collective(
        kind=kind, bytes=sum(sizes), runs=runs,
        asynchronous=started or "async_collective" in computation or "async_collective_name" in match["rest"],
        shape=re.sub(r"\{[^}]*\}|/\*.*?\*/", "", match["shape"]), origin=origin[1] if origin else "",
    )


def _elements(shape: str) -> list[str]:
    """The elements of an HLO tuple, tuples among them whole; of an array's shape, itself."""
    shape = re.sub(r"\{[^}]*\}|/\*.*?\*/", "", shape)
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


def _arrays(shape: str) -> list[int]:
    """Bytes of each array in an HLO shape or tuple of shapes."""
    return [
        math.prod(int(n) for n in dims.split(",") if n) * _BITS[kind] // 8
        for kind, dims in _ARRAY.findall(re.sub(r"\{[^}]*\}", "", shape)) if kind in _BITS
    ]


def _group_size(rest: str) -> int:
    """Devices that take part together, from any of the forms in which HLO writes replica groups."""
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", rest):
        axes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
        return math.prod(int(axes[axis]) for axis in re.findall(r"'(\w+)'", match[2]))
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]", rest):
        return int(match[1])
    if match := re.search(r"replica_groups=\{\{([\d,]*)\}", rest):
        return len(match[1].split(","))
    return 1


def _computations(hlo: str) -> tuple[str, dict[str, list[str]]]:
    """(name of the entry, lines of each computation)."""
    computations: dict[str, list[str]] = {}
    entry, current = "", None
    for line in hlo.splitlines():
        if current is None:
            if match := _COMPUTATION.match(line):
                current = computations[match[2]] = []
                entry = match[2] if match[1] else entry
        elif line.startswith("}"):
            current = None
        else:
            current.append(line)
    return entry, computations


def _calls(line: str) -> Iterator[str]:
    yield from _CALLED.findall(line)
    for group in _BRANCHES.findall(line):
        yield from re.findall(r"[\w.\-]+", group)


def _runs(entry: str, computations: dict[str, list[str]]) -> dict[str, int]:
    """How often each computation runs."""
    runs: dict[str, int] = {}

    def visit(name: str, times: int) -> None:
        runs[name] = runs.get(name, 0) + times
        for line in computations[name]:
            if "=%" not in line and "={" not in line:
                continue
            trips = _trip_count(line, computations)
            for called in _calls(line):
                if called in computations:
                    visit(called, times * trips)

    visit(entry, 1)
    return runs


def _trip_count(line: str, computations: dict[str, list[str]]) -> int:
    """Trips of the loop that `line` calls: what the compiler knows, else the constant of its condition, else 1."""
    if " while(" not in line:
        return 1
    if match := re.search(r'known_trip_count\D*(\d+)', line):
        return int(match[1])
    condition = re.search(r"condition=%?([\w.\-]+)", line)
    if condition is None:
        return 1
    text = "\n".join(computations.get(condition[1], ()))
    bounds = [int(n) for n in re.findall(r"constant\((\d+)\)", text)]
    return bounds[0] if len(bounds) == 1 else 1
