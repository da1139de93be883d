"""Compiled programs as evidence: devices of TPU topologies that are not here, and the collectives a program runs."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all")
WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}


@dataclass(frozen=True)
class Collective:
    """One collective of a program's text.

    Attributes:
      kind: one of COLLECTIVES.
      bytes: of its result on one device.
      shapes: of its result's arrays.
      trips: how often it runs in one run of the program; loops that do not count to a constant make one trip.
      in_loop: whether it lies in a loop.
      in_branch: whether it lies in a branch, which a run may not take.
    """

    kind: str
    bytes: int
    shapes: tuple[tuple[int, ...], ...]
    trips: int
    in_loop: bool
    in_branch: bool


def topology_devices(name: str) -> list[Any]:
    """Devices of a named TPU topology such as v5e:4x4 or v5p:2x2x2.

    Raises:
      ValueError: no TPU compiler here, or no such topology.
    """
    try:
        import libtpu
    except ImportError:
        raise ValueError(f'topology {name} needs the TPU compiler; pip install "jax[tpu]"') from None
    os.environ.setdefault("TPU_LIBRARY_PATH", libtpu.get_library_path())
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    from jax.experimental import topologies

    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"got topology {name!r}, expected one like v5e:4x4 or v5p:2x2x2 ({reason})") from None


def collectives(text: str) -> dict[str, dict[str, int]]:
    """Totals of a whole program, branches included."""
    return totals(find_collectives(text))


def totals(found: Iterable[Collective]) -> dict[str, dict[str, int]]:
    """Collectives by kind: how many run, and the bytes of their results on one device. Every trip of a loop counts."""
    found = list(found)
    sums: dict[str, dict[str, int]] = {}
    for kind in COLLECTIVES:
        same = [one for one in found if one.kind == kind]
        if same:
            sums[kind] = {"count": sum(one.trips for one in same), "bytes": sum(one.trips * one.bytes for one in same)}
    return sums


def find_collectives(text: str) -> list[Collective]:
    """Every collective that the text of a compiled program reaches from its entry, branches included.

    TPUs run a collective beside other work: the text names it where it starts, in fusions that move it on (also those of a
    loop: one collective lasts all its trips) and where it is done. Only the start counts.
    """
    bodies: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        opening = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line.strip())
        if opening and not line.startswith("  "):
            name = opening.group(1)
            bodies[name] = []
        elif name:
            bodies[name].append(line)
    entry = re.search(r"ENTRY %?([\w.\-]+)", text)

    def visit(name: str, trips: int, in_loop: bool, in_branch: bool) -> Iterator[Collective]:
        for line in bodies.get(name, ()):
            found = re.search(r"= (.+?) ([a-z\-]+)\(", line)
            if not found:
                continue
            kind = found.group(2).removesuffix("-start")
            if kind in COLLECTIVES:
                arrays = _arrays(found.group(1), found.group(2).endswith("-start"))
                shapes = tuple(shape for _, shape in arrays)
                yield Collective(kind, sum(size for size, _ in arrays), shapes, trips, in_loop, in_branch)
            times, loop = trips, in_loop
            if kind == "while":
                times, loop = trips * _trips(line, bodies), True
            if not line.strip().removeprefix("ROOT ").startswith("%async-collective-done"):
                for called in re.findall(r"(?:body|condition|calls|to_apply)=%?([\w.\-]+)", line):
                    if not called.startswith("async_collective_fusion"):
                        yield from visit(called, times, loop, in_branch)
            branches = re.findall(r"(?:true_computation|false_computation)=%?([\w.\-]+)", line)
            for group in re.findall(r"branch_computations=\{([^}]*)\}", line):
                branches += re.findall(r"%?([\w.\-]+)", group)
            for called in branches:
                yield from visit(called, times, loop, True)

    return list(visit(entry.group(1), 1, False, False)) if entry else []


def _trips(line: str, bodies: dict[str, list[str]]) -> int:
    """Trips of a loop: as the compiler notes them or, where it does not (TPUs), the constant that a counter stays below."""
    known = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
    if known:
        return int(known.group(1))
    condition = "\n".join(bodies.get(re.search(r"condition=%?([\w.\-]+)", line).group(1), ()))
    last = re.search(r"ROOT \S+ = pred\[\]\S* compare\(.*%([\w.\-]+)\), direction=LT", condition)
    bound = last and re.search(rf"%{re.escape(last.group(1))} = s32\[\]\S* constant\((\d+)\)", condition)
    return int(bound.group(1)) if bound else 1


def _arrays(result: str, is_pair: bool) -> list[tuple[int, tuple[int, ...]]]:
    """Bytes and shape of each array of a result; of an asynchronous start's operands and results, the largest alone."""
    arrays = []
    for kind, dims in re.findall(r"(\w+)\[([\d,]*)\]", result):
        shape = tuple(int(size) for size in dims.split(",") if size)
        arrays.append((WIDTHS.get(kind, 4) * math.prod(shape), shape))
    return [max(arrays)] if is_pair and arrays else arrays
