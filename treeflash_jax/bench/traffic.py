"""Memory traffic of a compiled program, read from its text: the compiler's own analysis counts one trip of every loop."""

from __future__ import annotations

import re
from typing import NamedTuple

from treeflash_jax.bench.collectives import COMPUTATIONS, count_trips, read_arrays

INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%([\w.\-]+) = (.+?) ([a-z][a-z\-]*)\(([^)]*)")
ON_CHIP = re.compile(r"\w+\[[\d,]*\]\{[^}]*S\(\d+\)\}")
FREE = "parameter constant tuple get-tuple-element bitcast after-all opt-barrier partition-id replica-id iota".split()


class Instruction(NamedTuple):
    """One instruction of a computation; `held` are the bytes of its results that are not in memory on the chip."""

    operation: str
    operands: tuple[str, ...]
    size: int
    held: int
    line: str


def count_bytes(text: str) -> int:
    """Returns the bytes of main memory that a program reads and writes on one device, all trips of loops included.

    Slices and updates in place count as much as they move. A kernel's operands and results count once, even if it reads
    them several times.
    """
    lines = {name: body.splitlines() for _, name, body in COMPUTATIONS.findall(text)}
    bodies = {name: dict(_parse(line) for line in body if INSTRUCTION.match(line)) for name, body in lines.items()}

    def moved(body: dict[str, Instruction], step: Instruction) -> int:
        is_fusion, is_start = step.operation == "fusion", step.operation.endswith("-start")
        total = step.held if is_start else step.held + sum(body[name].held for name in step.operands if name in body)
        inner = bodies[_find_called(step)] if is_fusion else body
        for part in inner.values() if is_fusion else [step]:
            source = inner.get(part.operands[0]) if part.operands else None
            if source is None or is_fusion and source.operation not in ("parameter", "bitcast"):
                continue
            if part.operation in ("dynamic-slice", "slice", "gather"):
                total -= source.size - part.size
            elif part.operation == "dynamic-update-slice":
                total -= 2 * (part.size - inner[part.operands[1]].size)
        return max(total, 0)

    def visit(name: str) -> int:
        total = 0
        for step in bodies[name].values():
            if step.operation in ("while", "call", "async-start"):
                total += (count_trips(step.line, lines) if step.operation == "while" else 1) * visit(_find_called(step))
            elif step.operation not in FREE and not step.operation.endswith("-done"):
                total += moved(bodies[name], step)
        return total

    return sum(visit(name) for entry, name, _ in COMPUTATIONS.findall(text) if entry)


def _find_called(step: Instruction) -> str:
    return re.search(r"(?:body|calls|to_apply)=%?([\w.\-]+)", step.line)[1]


def _parse(line: str) -> tuple[str, Instruction]:
    name, result, operation, operands = INSTRUCTION.match(line).groups()
    size, held = (sum(size for size, _ in read_arrays(x)) for x in (result, ON_CHIP.sub("", result)))
    return name, Instruction(operation, tuple(re.findall(r"%([\w.\-]+)", operands)), size, held, line)
