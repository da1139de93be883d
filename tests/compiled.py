"""Checks of compiled programs."""

import math
import re
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh

from treeflash_jax.core import programs
from treeflash_jax.decoding import loops

CAPACITY = 384  # in chunks of 64 tokens, no activations have the shape of a cache of this capacity
ONE_H100 = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu"))
HOST = ("callback", "infeed", "outfeed", "send(", "recv(")


def copies_in_loops(program, shape: tuple[int, ...]) -> list[str]:
    """Lines of a compiled program, outside its entry, that copy a float32 array of this shape, or slice one out."""
    inside, copies = "", []
    copy = re.compile(rf"= f32\[{','.join(map(str, shape))}\]\S* (?:copy|slice|dynamic-slice)\(")
    for line in program.as_text().splitlines():
        inside = line if line.endswith("{") and not line.startswith(" ") else inside
        copies += [line] if copy.search(line) and "ENTRY" not in inside else []
    return copies


def gathered_shapes() -> list[tuple[int, ...]]:
    """Shapes that devices gather from each other in the rounds that are compiled."""
    text = "".join(program.executable.as_text() for program in programs.compiled(loops.decode))
    assert " all-reduce(" in text, "devices share the rounds"
    return [tuple(map(int, sizes.split(","))) for sizes in re.findall(r"= \(?\w+\[([\d,]+)\][^=]* all-gather", text)]


def moved_shapes(text: str) -> list[tuple[int, ...]]:
    """Shapes of the results of all collectives in the text of a compiled program."""
    kinds = "all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all"
    results = re.findall(rf"= ([^=]*?) (?:{kinds})(?:-start)?\(", text)
    return [tuple(map(int, sizes.split(","))) for result in results for sizes in re.findall(r"\w+\[([\d,]+)\]", result)]


def assert_copies_nothing(program, state) -> None:
    """No loop of a program copies a cache of the state."""
    stacks = {x.shape for x in jax.tree.leaves((state.cache, state.drafter)) if x.ndim == 5}  # keys and values
    shapes = stacks | {(batch, *rest) for batch, layers, *rest in stacks if layers == 1}
    assert shapes and [line for shape in shapes for line in copies_in_loops(program, shape)] == []


def assert_one_program(weights, state, plan) -> str:
    """Rounds run on the device alone, donate the caches, and no loop copies one; returns the program's text."""
    count = jax.device_put(jnp.int32(3))
    compiled = loops.decode.lower(weights, state, count, plan=plan).compile()
    text, caches = compiled.as_text(), [x for x in jax.tree.leaves((state.cache, state.drafter)) if x.ndim == 5]
    assert not [word for word in HOST if word in text]
    assert_copies_nothing(compiled, state)
    with jax.transfer_guard("disallow"):
        after = compiled(weights, state, count)
    assert all(array.is_deleted() for array in caches)
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(array.nbytes for array in caches)
    assert after.rounds_b.tolist() == [3] * after.rounds_b.size
    return text


def reductions_of_weights(text: str, least: int) -> list[str]:
    """Fusions of a program compiled for a TPU that read an array of at least this many numbers and multiply by summing.

    So a TPU multiplies one vector by a weight: on the vector unit.
    """
    computations = dict(re.findall(r"^(%[\w.-]+) .*?\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL))
    sums = set()
    for name, body in computations.items():
        shapes = re.findall(r"= \w+\[([\d,]+)\]\S* multiply\(", body)
        if any(math.prod(map(int, shape.split(","))) >= least for shape in shapes) and " reduce(" in body:
            sums.add(name)
    return [line.strip() for line in text.splitlines() for name in re.findall(r"calls=(%[\w.-]+)", line) if name in sums]


def written_weights(text: str, shapes: Iterable[tuple[int, ...]], nodes: int, *, on_chip: bool = False) -> list[str]:
    """Returns the operations in loops of a compiled program that write an array of a weight's size to memory.

    TPUs also move weights into their on-chip memory, S(1). Arrays with an axis as long as the tree are taken for
    activations.

    Args:
      shapes: shapes of a device's weights; a drafter's should have other sizes.
      on_chip: whether to return operations that write to on-chip memory too, but for those that only move a weight there.
    """
    sizes, written = {math.prod(shape) for shape in shapes}, []
    computations = dict(re.findall(r"^(ENTRY|%?[\w.-]+) .*?\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL))
    bodies = set(re.findall(r" while\(.* body=(%?[\w.-]+)", text))
    operation = re.compile(r"= (.*?) (copy|convert|multiply|fusion|transpose|custom-call)\(")
    for line in "".join(computations[body] for body in bodies).splitlines():
        for results, kind in operation.findall(line):
            place = "" if on_chip and kind != "custom-call" else r"(?!\S*S\(1\))"
            found = [[*map(int, axes.split(","))] for axes in re.findall(rf"\w\[([\d,]+)\]{place}", results)]
            is_weight = [math.prod(shape) in sizes and (nodes == 1 or nodes not in shape) for shape in found]
            written += [line] if any(is_weight) else []
    return written
