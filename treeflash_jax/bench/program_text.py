"""Collectives and memory traffic of a compiled program, read from its text.

The compiler's own analysis names no collectives, and counts one trip of every loop.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all")
WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}$", flags=re.MULTILINE | re.DOTALL)
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%([\w.\-]+) = (.+?) ([a-z][a-z\-]*)\(([^)]*)")
CALLED = re.compile(r"(?:body|condition|calls|to_apply)=%?([\w.\-]+)")
BRANCHES = re.compile(r"(?:true_computation|false_computation)=%?([\w.\-]+)|branch_computations=\{([^}]*)\}")
ON_CHIP = re.compile(r"\w+\[[\d,]*\]\{[^}]*S\(\d+\)\}")
FREE = "parameter constant tuple get-tuple-element bitcast after-all opt-barrier partition-id replica-id iota".split()


class Instruction(NamedTuple):
    """One instruction: bytes and shape of each array of its result, and the computations that it runs."""

    name: str
    operation: str
    operands: list[str]
    arrays: list[tuple[int, tuple[int, ...]]]
    off_chip: int  # bytes of its result that are not in the memory on the chip
    called: list[str]
    branches: list[str]  # computations of which it runs one
    trips: int  # of a loop; 1 if it does not count to a constant

    @property
    def size(self) -> int:
        return sum(size for size, _ in self.arrays)


Computations = dict[str, dict[str, Instruction]]


@dataclass(frozen=True)
class Collective:
    """One collective of a program; whether it is in a loop, and in a branch, which a run may not take."""

    kind: str  # of KINDS
    bytes: int  # of its result on one device
    shapes: tuple[tuple[int, ...], ...]  # of its result's arrays
    trips: int  # in one run of the program
    in_loop: bool
    in_branch: bool


def find_collectives(text: str) -> list[Collective]:
    """Finds every collective that a compiled program reaches from its entry, branches included.

    A TPU runs a collective beside other work: the text names it at its start, in the fusions that advance it (during all
    trips of a loop, if they are in one) and at its end. Only the start counts.
    """
    collectives = []
    for step, _, trips, around in _walk(_parse(text)):
        if (kind := step.operation.removesuffix("-start")) in KINDS:
            # A start lists its operands and results: the largest array is the result.
            arrays = step.arrays if kind == step.operation else [max(step.arrays)]
            size, shapes = sum(size for size, _ in arrays), tuple(shape for _, shape in arrays)
            collectives.append(Collective(kind, size, shapes, trips, "loop" in around, "branch" in around))
    return collectives


def sum_collectives(collectives: Iterable[Collective]) -> dict[str, dict[str, int]]:
    """Returns the number of collectives by kind and the bytes of their results on one device; all trips count."""
    sums: dict[str, dict[str, int]] = {}
    for collective in sorted(collectives, key=lambda c: KINDS.index(c.kind)):
        total = sums.setdefault(collective.kind, {"count": 0, "bytes": 0})
        total["count"] += collective.trips
        total["bytes"] += collective.trips * collective.bytes
    return sums


def count_moved(collectives: Sequence[Collective], sequences: int, size: int) -> int:
    """Counts collectives whose result holds `size` numbers of each of `sequences` or more, in any layout."""
    shapes = [shape for collective in collectives for shape in collective.shapes]
    return sum(math.prod(shape) >= sequences * size and math.prod(shape) % size == 0 for shape in shapes)


def count_bytes(text: str) -> int:
    """Returns the bytes of main memory that a program reads and writes on one device, all trips of loops included.

    Slices and updates in place count as much as they move. A kernel's operands and results count once, even if it reads
    them several times. Of a branch, operands and results count.
    """
    computations, total = _parse(text), 0
    for step, body, trips, around in _walk(computations):
        is_control = step.operation in ("while", "call", "async-start", *FREE) or step.operation.endswith("-done")
        if is_control or around & {"branch", "operation"}:
            continue
        is_fusion, is_start = step.operation == "fusion", step.operation.endswith("-start")
        moved = step.off_chip + (0 if is_start else sum(body[name].off_chip for name in step.operands if name in body))
        inner = computations[step.called[0]] if is_fusion else body
        for part in inner.values() if is_fusion else [step]:
            source = inner.get(part.operands[0]) if part.operands else None
            if source is None or is_fusion and source.operation not in ("parameter", "bitcast"):
                continue
            if part.operation in ("dynamic-slice", "slice", "gather"):
                moved -= source.size - part.size
            elif part.operation == "dynamic-update-slice":
                moved -= 2 * (part.size - inner[part.operands[1]].size)
        total += trips * max(moved, 0)
    return total


def _walk(
    computations: Computations, name: str = "ENTRY", trips: int = 1, around: frozenset[str] = frozenset()
) -> Iterator[tuple[Instruction, dict[str, Instruction], int, frozenset[str]]]:
    """Yields every instruction that a computation reaches, once.

    Beside it, those around it by name, the number of times that it runs, and what it is in: "loop", "branch", "operation"
    (a fusion or a reduction).
    """
    body = computations.get(name, {})
    for step in body.values():
        yield step, body, trips, around
        if step.name.startswith("async-collective-done"):
            continue
        kind = {"while": {"loop"}, "call": set(), "async-start": set()}.get(step.operation, {"operation"})
        for called in step.called:
            if not called.startswith("async_collective_fusion"):
                yield from _walk(computations, called, trips * step.trips, around | kind)
        for called in step.branches:
            yield from _walk(computations, called, trips, around | {"branch"})


def _parse(text: str) -> Computations:
    """Returns the instructions of every computation by name; that of the program is called ENTRY."""
    lines = {"ENTRY" if entry else name: body.splitlines() for entry, name, body in COMPUTATION.findall(text)}
    return {name: {step.name: step for step in _read(body, lines)} for name, body in lines.items()}


def _read(body: list[str], lines: dict[str, list[str]]) -> Iterator[Instruction]:
    for line in body:
        if match := INSTRUCTION.match(line):
            name, result, operation, operands = match.groups()
            arrays, off_chip = _read_arrays(result), sum(size for size, _ in _read_arrays(ON_CHIP.sub("", result)))
            branches = re.findall(r"[\w.\-]+", " ".join(map(" ".join, BRANCHES.findall(line))))
            called, trips = CALLED.findall(line), _count_trips(line, lines) if operation == "while" else 1
            operands = re.findall(r"%([\w.\-]+)", operands)
            yield Instruction(name, operation, operands, arrays, off_chip, called, branches, trips)


def _count_trips(line: str, lines: dict[str, list[str]]) -> int:
    """Returns the trips of a loop: as the compiler notes them, or (TPUs) the constant that a counter stays below."""
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', line):
        return int(known.group(1))
    called = re.search(r"condition=%?([\w.\-]+)", line)
    condition = "\n".join(lines.get(called and called.group(1), ()))
    last = re.search(r"ROOT \S+ = pred\[\]\S* compare\(.*%([\w.\-]+)\), direction=LT", condition)
    bound = last and re.search(rf"%{re.escape(last.group(1))} = s32\[\]\S* constant\((\d+)\)", condition)
    return int(bound.group(1)) if bound else 1


def _read_arrays(result: str) -> list[tuple[int, tuple[int, ...]]]:
    """Returns bytes and shape of each array of a result's type."""
    arrays = re.findall(r"(\w+)\[([\d,]*)\]", result)
    shapes = ((dtype, tuple(int(size) for size in sizes.split(",") if size)) for dtype, sizes in arrays)
    return [(WIDTHS.get(dtype, 4) * math.prod(shape), shape) for dtype, shape in shapes]
