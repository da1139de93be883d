"""Cycles that the compiler for TPUs estimates for a program's operations, read from the program's compiled text.

For other devices, the text has no estimates. An estimate is not a measurement. It is the sum over operations that run one
after the other. It leaves out copies that run beside them, for example of the next weights into on-chip memory.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass, field

PHASES = ("draft", "tree", "verify", "accept", "commit")  # named scopes of a round
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
_BITS = {"pred": 8, "f8e4m3fn": 8, "bf16": 16}  # bits of an element; other types have them in their names
_UNCOUNTED = re.compile(
    rf" (conditional|sort|(?:{'|'.join(COLLECTIVES)})(?:-start)?)\("
    r'|custom_call_target="(TopK|tpu_custom_call)"|%(gather)\S* = .* fusion\('
)


@dataclass
class Estimate:
    """Estimated cycles of a program, or of one iteration of its loop.

    Attributes:
      phases: named scopes of the program.
      operations: cycles by phase and by name of the operation in JAX; equal operations of several layers are added up.
      counts: number of times that each of these operations runs.
      copied: bytes of copies between the chip's memory and its on-chip memory, which run beside the operations.
      missing: operations without an estimate, by phase and kind: conditionals, loops of unknown length, collectives, sorts,
        top-k, gathers, Pallas kernels.
    """

    phases: tuple[str, ...]
    operations: Counter[tuple[str, str]] = field(default_factory=Counter)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    missing: Counter[tuple[str, str]] = field(default_factory=Counter)
    copied: int = 0

    def by_phase(self) -> dict[str, int]:
        phases: Counter[str] = Counter()
        for (phase, _), cycles in self.operations.items():
            phases[phase] += cycles
        return {phase: phases[phase] for phase in (*self.phases, "other") if phases[phase]}


def parse(text: str) -> dict[str, str]:
    """Returns the computations of a compiled program by name, each as its lines. The main computation is "ENTRY"."""
    text = re.sub(r"kernel_metadata=\{\n.*?\n\}", "", text, flags=re.DOTALL)  # it would end the line of a Pallas kernel
    return dict(re.findall(r"^(ENTRY|%?[\w.-]+) [^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL))


def loop_bodies(computations: dict[str, str]) -> list[str]:
    """Returns the names of the loop bodies in the main computation."""
    return re.findall(r" while\(.* body=(%?[\w.-]+)", computations["ENTRY"])


def estimate(text: str, phases: tuple[str, ...] = PHASES, *, is_loop: bool = True) -> Estimate:
    """Returns the estimate for one iteration of a program's largest loop, from the program's compiled text.

    An inner loop counts times its number of iterations if its condition is a comparison with a constant.

    Args:
      phases: named scopes by which operations are counted.
      is_loop: False: the estimate is for the whole program.
    """
    computations = parse(text)
    result = Estimate(phases)

    def walk(name: str, times: int) -> None:
        for line in computations[name].splitlines():
            phase, operation = _place(line, phases)
            cycles = re.search(r'"estimated_cycles":"(\d+)"', line)
            loop = re.search(r" while\(.* condition=(%?[\w.-]+), body=(%?[\w.-]+)", line)
            uncounted = _UNCOUNTED.search(line)
            if loop:
                trips = _trip_count(computations[loop[1]])
                if trips is None:
                    result.missing[phase, "while"] += times
                else:
                    walk(loop[2], times * trips)
            elif cycles:
                result.operations[phase, operation] += times * int(cycles[1])
                result.counts[phase, operation] += times
            elif re.search(r" (?:copy|slice)-start\(", line):
                result.copied += times * _on_chip_bytes(line)
            elif uncounted:
                result.missing[phase, next(filter(None, uncounted.groups())).removesuffix("-start")] += times

    main = "ENTRY"
    if is_loop:
        main = max(loop_bodies(computations), key=lambda name: len(computations[name]))
    walk(main, 1)
    return result


def _trip_count(condition: str) -> int | None:
    """Returns the bound of a loop that counts up from 0, as JAX's loops do; None if its end depends on data."""
    root = re.search(r"ROOT .* compare\((%?[\w.-]+), (%?[\w.-]+)\), direction=LT", condition)
    bound = root and re.search(rf"^ *{re.escape(root[2])} = \S+ constant\((\d+)\)", condition, re.MULTILINE)
    return int(bound[1]) if bound else None


def _on_chip_bytes(line: str) -> int:
    """Returns the bytes in on-chip memory, S(1), of the array that an operation copies."""
    array = re.search(r"(\w+)\[([\d,]*)\]\{[^}]*S\(1\)\}", line)
    if not array:
        return 0
    bits = _BITS.get(array[1]) or int(re.search(r"\d+", array[1])[0])
    return math.prod(map(int, filter(None, array[2].split(",")))) * bits // 8


def _place(line: str, phases: tuple[str, ...]) -> tuple[str, str]:
    """Returns the phase of an operation, and its JAX name without layer numbers and names of transformations."""
    name = re.search(r'op_name="([^"]*)"', line)
    if not name:
        return "other", "without a name"
    path = re.sub(r"(?:transpose\()?jvp\((\w*)\)+", r"\1", name[1])  # gradients belong to the scope of their function
    path = re.sub(r"_\d+\b", "", path)
    parts = [part for part in path.split("/") if not re.match(r"jit\(|cond$|branch(_\d+)?_fun$|while$|body$|$", part)]
    phase = next((part for part in parts if part in phases), "other")
    return phase, "/".join(part for part in parts if part != phase)
