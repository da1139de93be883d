"""Constraints as automata over bytes, compiled in a process of its own, as small as possible."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

import numpy as np

from treeflash_jax.constraints.compiler import process
from treeflash_jax.core.checks import clipped
from treeflash_jax.decoding.automaton import NOWHERE

RUN: ContextVar[Callable[..., subprocess.CompletedProcess]] = ContextVar("run", default=subprocess.run)  # starts compilers
MOST_STATES = 2**17
MOST_SECONDS, MOST_MEMORY = 60, 2 * 2**30  # that compiling a constraint may take
# The package itself is not imported, nor JAX with it.
START = """import sys, types
sys.modules["treeflash_jax"] = package = types.ModuleType("treeflash_jax")
package.__path__ = [sys.argv.pop(1)]
from treeflash_jax.constraints.compiler.process import main
main()"""


class Unusable(Exception):
    """A constraint without a table; the text says why."""


class ByteAutomaton(NamedTuple):
    """A deterministic automaton over bytes; texts begin in state 0.

    Attributes:
      next_qk: state after a byte of each class, or NOWHERE.
      class_y: class of each byte, [256].
      is_final_q: whether a text may end in a state.
    """

    next_qk: np.ndarray
    class_y: np.ndarray
    is_final_q: np.ndarray


def compile_bytes(kind: str, value: str | Sequence[str], depth: int, thoughts_end: str | None = None) -> ByteAutomaton:
    """Returns the automaton of a constraint.

    Args:
      kind: "schema" (JSON text), "pattern" or "choices".
      depth: levels up to which values nest that a schema does not describe, or that contain themselves.
      thoughts_end: what ends a free text before the constraint; None without such a text.

    Raises Unusable for a constraint that cannot be followed, that nothing satisfies, or that takes too much to compile.
    """
    request = {"kind": kind, "value": value, "depth": depth, "states": MOST_STATES, "thoughts_end": thoughts_end}
    command = [sys.executable, "-P", "-c", START, str(Path(__file__).parents[1]), str(MOST_SECONDS), str(MOST_MEMORY)]
    run = RUN.get()(command, input=json.dumps(request).encode(), capture_output=True)
    if run.returncode == process.REFUSED:
        raise Unusable(f"which cannot be followed: {clipped(run.stderr.decode(), 200)}")
    if run.returncode == 1:  # an error of the compiler
        raise RuntimeError(run.stderr.decode())
    if run.returncode:  # by memory, or killed by the limit of time
        limits = f"{MOST_SECONDS} s or {MOST_MEMORY / 2**30:g} GiB"
        raise Unusable(f"which takes more than {limits} to compile: give shorter repetitions")
    return minimize(_read(np.frombuffer(run.stdout, np.int32)))


def _read(numbers: np.ndarray) -> ByteAutomaton:
    """Returns the automaton that the compiler wrote."""
    num_masks, num_edges, num_final = numbers[:3]
    ends = np.cumsum([3, num_masks * 256, num_edges * 3, num_final])
    flags_my, edges_e3, final = (numbers[a:b] for a, b in zip(ends, ends[1:], strict=False))
    flags_ym = flags_my.reshape(-1, 256).T.astype(bool)
    kinds_km, class_y = np.unique(flags_ym, axis=0, return_inverse=True)
    edges_e3 = edges_e3.reshape(-1, 3)
    next_qk = np.full((1 + max([0, *edges_e3[:, 2], *final]), len(kinds_km)), NOWHERE, np.int32)
    edge, kind = np.nonzero(kinds_km.T[edges_e3[:, 1]])
    next_qk[edges_e3[edge, 0], kind] = edges_e3[edge, 2]
    is_final_q = np.zeros(len(next_qk), bool)
    is_final_q[final] = True
    return ByteAutomaton(next_qk, class_y.reshape(-1), is_final_q)


def minimize(automaton: ByteAutomaton) -> ByteAutomaton:
    """Returns the smallest automaton of the same texts: states with the same texts after them become one.

    Groups of states are split until the bytes of a group lead to the same groups (Moore); a split is followed only to the
    states that lead to it.
    """
    next_qk, class_y, is_final_q = automaton
    num_states, num_classes = next_qk.shape
    # One more state, from which nothing is accepted, in place of NOWHERE.
    next_qk = np.append(np.where(next_qk == NOWHERE, num_states, next_qk), np.full((1, num_classes), num_states), axis=0)
    group_q = np.append(is_final_q, False).astype(np.int64)
    source_e, target_e = np.repeat(np.arange(num_states + 1), num_classes), next_qk.ravel()
    order = np.argsort(target_e, kind="stable")
    source_e, starts_q = source_e[order], np.searchsorted(target_e[order], np.arange(num_states + 2))
    size_g = np.zeros(num_states + 2, np.int64)
    size_g[:2] = np.bincount(group_q, minlength=2)
    num_groups, changed = 2, np.arange(num_states + 1)
    while changed.size:
        affected = np.unique(np.concatenate([source_e[starts_q[q] : starts_q[q + 1]] for q in changed]))
        signature = np.column_stack([group_q[affected], group_q[next_qk[affected]]])
        _, first, kind, count = np.unique(signature, axis=0, return_index=True, return_inverse=True, return_counts=True)
        group_p = group_q[affected[first]]  # of each part of a group
        moves_p = np.ones(len(count), bool)
        affected_g = np.bincount(group_p, weights=count, minlength=len(size_g))
        by_size = np.argsort(-count, kind="stable")
        largest = by_size[np.unique(group_p[by_size], return_index=True)[1]]
        moves_p[largest] = affected_g[group_p[largest]] < size_g[group_p[largest]]  # it stays if no other part is left
        np.subtract.at(size_g, group_p[moves_p], count[moves_p])
        group_p[moves_p] = num_groups + np.arange(moves_p.sum())
        size_g[group_p[moves_p]] = count[moves_p]
        num_groups += moves_p.sum()
        group_a = group_p[kind.reshape(-1)]
        changed = affected[group_a != group_q[affected]]
        group_q[affected] = group_a
    # Groups in the order of their first states, that of state 0 first; the group of the added state is NOWHERE.
    _, first, number_q = np.unique(group_q, return_index=True, return_inverse=True)
    kept = np.sort(first[first != first[number_q[num_states]]])
    rank_g = np.full(len(first), NOWHERE, np.int32)
    rank_g[number_q[kept]] = np.arange(len(kept))
    return ByteAutomaton(rank_g[number_q[next_qk[kept]]], class_y, is_final_q[kept])
