"""The smallest automaton of a set of byte strings, as arrays.

Shape suffixes: q states, k classes of bytes, y bytes, m sets of bytes, e edges, g groups of states, a affected states,
p parts of groups.
"""

from typing import NamedTuple

import numpy as np

from treeflash_jax.constraints.compiler.terms import Term, walk

NOWHERE = -1  # as in decoding.automaton, which imports JAX


class ByteAutomaton(NamedTuple):
    """A deterministic automaton over bytes. Texts begin in state 0.

    Attributes:
      next_qk: state after a byte of each class, or NOWHERE.
      class_y: class of each byte, [256].
      is_final_q: whether a text may end in each state.
    """

    next_qk: np.ndarray
    class_y: np.ndarray
    is_final_q: np.ndarray

    def to_bytes(self) -> bytes:
        """Returns the automaton as int32: number of states, `class_y`, `is_final_q`, `next_qk`."""
        arrays = [np.array([len(self.next_qk)]), self.class_y, self.is_final_q, self.next_qk.ravel()]
        return np.concatenate(arrays).astype(np.int32).tobytes()

    @staticmethod
    def from_bytes(data: bytes) -> "ByteAutomaton":
        numbers = np.frombuffer(data, np.int32)
        num_states = numbers[0]
        class_y, is_final_q, next_qk = np.split(numbers[1:], [256, 256 + num_states])
        return ByteAutomaton(next_qk.reshape(num_states, -1), class_y, is_final_q.astype(bool))


def read_automaton(term: Term, most: int) -> ByteAutomaton:
    """Returns the smallest automaton of a set. Raises TooLarge if it has more than `most` states before minimisation."""
    states = list(walk(term, most))
    numbers = {state: number for number, state in enumerate(states)}
    masks = list(dict.fromkeys(mask for state in states for mask, _ in state.edges()))
    has_byte_ym = np.array([[mask >> value & 1 for mask in masks] for value in range(256)], bool)
    kinds_km, class_y = np.unique(has_byte_ym, axis=0, return_inverse=True)
    classes = {mask: np.flatnonzero(kinds_km[:, m]) for m, mask in enumerate(masks)}
    next_qk = np.full((len(states), len(kinds_km)), NOWHERE, np.int32)
    for number, state in enumerate(states):
        for mask, after in state.edges():
            next_qk[number, classes[mask]] = numbers[after]
    return minimize(ByteAutomaton(next_qk, class_y.reshape(-1), np.array([state.has_empty for state in states])))


def minimize(automaton: ByteAutomaton) -> ByteAutomaton:
    """Returns the smallest automaton of the same texts: states that accept the same remaining texts are merged.

    This is Hopcroft's algorithm in NumPy. At first there are two groups, the final states and all others. A group is split
    if some byte leads from its states to different groups. After a split, only states that lead to a state in a new group
    are examined again. The largest part of a split group keeps its number, so that few states change. Splitting all groups
    in every pass would take one pass per character of a long text.
    """
    next_qk, class_y, is_final_q = automaton
    num_states, num_classes = next_qk.shape
    # A further state, from which nothing is accepted, replaces NOWHERE.
    next_qk = np.append(np.where(next_qk == NOWHERE, num_states, next_qk), np.full((1, num_classes), num_states), axis=0)
    group_q = np.append(is_final_q, False).astype(np.int64)
    source_e = np.repeat(np.arange(num_states + 1), num_classes)
    target_e = next_qk.ravel()
    order = np.argsort(target_e, kind="stable")  # edges by target: those to state q begin at starts_q[q]
    source_e = source_e[order]
    starts_q = np.searchsorted(target_e[order], np.arange(num_states + 2))
    size_g = np.zeros(num_states + 2, np.int64)
    size_g[:2] = np.bincount(group_q, minlength=2)
    num_groups = 2
    changed = np.arange(num_states + 1)
    while changed.size:
        affected = np.unique(np.concatenate([source_e[starts_q[q] : starts_q[q + 1]] for q in changed]))
        signature = np.column_stack([group_q[affected], group_q[next_qk[affected]]])
        _, first_p, part_a, size_p = np.unique(
            signature, axis=0, return_index=True, return_inverse=True, return_counts=True
        )
        group_p = group_q[affected[first_p]]  # group that each part belongs to
        moves_p = np.ones(len(size_p), bool)
        affected_g = np.bincount(group_p, weights=size_p, minlength=len(size_g))
        by_size = np.argsort(-size_p, kind="stable")
        largest = by_size[np.unique(group_p[by_size], return_index=True)[1]]
        moves_p[largest] = affected_g[group_p[largest]] < size_g[group_p[largest]]  # whole groups keep their number
        np.subtract.at(size_g, group_p[moves_p], size_p[moves_p])
        group_p[moves_p] = num_groups + np.arange(moves_p.sum())
        size_g[group_p[moves_p]] = size_p[moves_p]
        num_groups += moves_p.sum()
        group_a = group_p[part_a.reshape(-1)]
        changed = affected[group_a != group_q[affected]]
        group_q[affected] = group_a
    # Groups are in the order of their first states, so that of state 0 is first. The added state's group is NOWHERE.
    _, first_g, number_q = np.unique(group_q, return_index=True, return_inverse=True)
    kept = np.sort(first_g[first_g != first_g[number_q[num_states]]])
    rank_g = np.full(len(first_g), NOWHERE, np.int32)
    rank_g[number_q[kept]] = np.arange(len(kept))
    return ByteAutomaton(rank_g[number_q[next_qk[kept]]], class_y, is_final_q[kept])
