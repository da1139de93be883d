"""Collectives of a compiled program, read from its text: the compiler's own analysis does not name them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all")
WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
COMPUTATIONS = re.compile(r"^(ENTRY )?%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}$", flags=re.MULTILINE | re.DOTALL)
CALLED = re.compile(r"(?:body|condition|calls|to_apply)=%?([\w.\-]+)")
BRANCHES = re.compile(r"(?:true_computation|false_computation)=%?([\w.\-]+)|branch_computations=\{([^}]*)\}")


@dataclass(frozen=True)
class Collective:
    """One collective of a program's text.

    Attributes:
      kind: one of KINDS.
      bytes: size of its result on one device.
      shapes: shapes of its result's arrays.
      trips: number of times it runs in one run of the program; loops that do not count to a constant make one trip.
      in_loop: whether it is in a loop.
      in_branch: whether it is in a branch, which a run may not take.
    """

    kind: str
    bytes: int
    shapes: tuple[tuple[int, ...], ...]
    trips: int
    in_loop: bool
    in_branch: bool


def find_collectives(text: str) -> list[Collective]:
    """Finds every collective that a compiled program reaches from its entry, branches included.

    TPUs run a collective beside other work: the text names it at its start, in the fusions that advance it (also those of a
    loop, all trips of which one collective lasts) and at its end. Only the start counts.
    """
    bodies = {name: body.splitlines() for _, name, body in COMPUTATIONS.findall(text)}
    collectives = []

    def visit(name: str, trips: int, in_loop: bool, in_branch: bool) -> None:
        for line in bodies.get(name, ()):
            match = re.search(r"= (.+?) ([a-z\-]+)\(", line)
            if not match or line.strip().removeprefix("ROOT ").startswith("%async-collective-done"):
                continue
            result, operation = match.groups()
            kind = operation.removesuffix("-start")
            if kind in KINDS:
                arrays = read_arrays(result)
                if kind != operation:  # a start lists its operands and results: the largest array is the result
                    arrays = [max(arrays)]
                size, shapes = sum(size for size, _ in arrays), tuple(shape for _, shape in arrays)
                collectives.append(Collective(kind, size, shapes, trips, in_loop, in_branch))
            is_loop = operation == "while"
            times = trips * count_trips(line, bodies) if is_loop else trips
            for called in CALLED.findall(line):
                if not called.startswith("async_collective_fusion"):
                    visit(called, times, in_loop or is_loop, in_branch)
            for single, several in BRANCHES.findall(line):
                for called in re.findall(r"[\w.\-]+", single or several):
                    visit(called, times, in_loop, True)

    for entry, name, _ in COMPUTATIONS.findall(text):
        if entry:
            visit(name, 1, False, False)
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


def count_trips(line: str, bodies: dict[str, list[str]]) -> int:
    """Returns the trips of a loop: as the compiler notes them, or (TPUs) the constant that a counter stays below."""
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', line):
        return int(known.group(1))
    condition = "\n".join(bodies.get(re.search(r"condition=%?([\w.\-]+)", line).group(1), ()))
    last = re.search(r"ROOT \S+ = pred\[\]\S* compare\(.*%([\w.\-]+)\), direction=LT", condition)
    bound = last and re.search(rf"%{re.escape(last.group(1))} = s32\[\]\S* constant\((\d+)\)", condition)
    return int(bound.group(1)) if bound else 1


def read_arrays(result: str) -> list[tuple[int, tuple[int, ...]]]:
    """Returns bytes and shape of each array of a result's type."""
    arrays = []
    for dtype, sizes in re.findall(r"(\w+)\[([\d,]*)\]", result):
        shape = tuple(int(size) for size in sizes.split(",") if size)
        arrays.append((WIDTHS.get(dtype, 4) * math.prod(shape), shape))
    return arrays
