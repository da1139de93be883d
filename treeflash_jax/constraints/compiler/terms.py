"""Sets of byte strings as terms, and their automata: Brzozowski's derivatives of extended regular expressions.

Terms are made by the functions below, never by `Term`. Equal terms are one object, so the terms that remain after each
byte are the states of a deterministic automaton. Unlike regular expressions, terms have intersections and complements. Both
cost nothing until the automaton is read. Source: Brzozowski, Derivatives of Regular Expressions (1964).

Sets of bytes are integers of 256 bits; bit 65 is the byte "A".
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache, reduce
from typing import Any

ALL_BYTES = (1 << 256) - 1


class TooLarge(Exception):
    """Raised for an automaton that has more states than allowed."""


class Term:
    """A set of byte strings.

    Attributes:
      kind: name of the function that made it.
      parts: its arguments.
      has_empty: whether the empty string is in the set.
    """

    __slots__ = "_edges", "has_empty", "kind", "parts"

    def __init__(self, kind: str, parts: tuple, has_empty: bool):
        self.kind = kind
        self.parts = parts
        self.has_empty = has_empty
        self._edges: list[tuple[int, Term]] | None = None

    def edges(self) -> list[tuple[int, "Term"]]:
        """Returns disjoint sets of first bytes, each with the term after them. Bytes in no set are impossible."""
        if self._edges is None:
            self._edges = [(mask, term) for mask, term in EDGES[self.kind](*self.parts) if term is not NOTHING]
        return self._edges


_terms: dict[tuple, Term] = {}


def _make(kind: str, parts: tuple, has_empty: bool) -> Term:
    key = (kind, *parts)
    term = _terms.get(key)
    if term is None:
        term = _terms[key] = Term(kind, parts, has_empty)
    return term


EMPTY = _make("literal", (b"",), True)  # the empty string alone
NOTHING = _make("byte", (0,), False)  # no string
ANYTHING = _make("complement", (NOTHING,), True)  # every string


def byte(mask: int) -> Term:
    """Returns the strings of one byte, which is in a set."""
    return _make("byte", (mask,), False)


def literal(text: bytes) -> Term:
    return _make("literal", (text,), not text)


def concat(*terms: Term) -> Term:
    """Returns the strings that join one string of each term, in this order."""
    return reduce(lambda tail, head: _pair(head, tail), reversed(terms), EMPTY)


def _pair(head: Term, tail: Term) -> Term:
    if head is EMPTY or tail is NOTHING:
        return tail
    if tail is EMPTY or head is NOTHING:
        return head
    if head.kind == "concat":
        return _pair(head.parts[0], _pair(head.parts[1], tail))
    if head.kind == tail.kind == "literal":
        return literal(head.parts[0] + tail.parts[0])
    return _make("concat", (head, tail), head.has_empty and tail.has_empty)


def union(*terms: Term) -> Term:
    """Returns the strings of any of the terms."""
    parts: dict[Term, None] = {}
    mask = 0
    for term in terms:
        for part in term.parts[0] if term.kind == "union" else [term]:
            if part.kind == "byte":
                mask |= part.parts[0]
            else:
                parts[part] = None
    if ANYTHING in parts:
        return ANYTHING
    if mask:
        parts[byte(mask)] = None
    if len(parts) < 2:
        return next(iter(parts), NOTHING)
    return _make("union", (frozenset(parts),), any(part.has_empty for part in parts))


def intersect(*terms: Term) -> Term:
    """Returns the strings that all terms have."""
    parts: dict[Term, None] = {}
    for term in terms:
        parts |= dict.fromkeys(term.parts[0] if term.kind == "intersect" else [term])
    parts.pop(ANYTHING, None)
    literals = sum(part.kind == "literal" for part in parts)
    if NOTHING in parts or literals > 1:
        return NOTHING
    if literals:  # a single string: it is in all other terms, or the intersection is empty
        text = next(part for part in parts if part.kind == "literal")
        return text if all(contains(part, text.parts[0]) for part in parts) else NOTHING
    if len(parts) < 2:
        return next(iter(parts), ANYTHING)
    return _make("intersect", (frozenset(parts),), all(part.has_empty for part in parts))


def complement(term: Term) -> Term:
    """Returns the strings that a term does not have."""
    if term.kind == "complement":
        return term.parts[0]
    return _make("complement", (term,), not term.has_empty)


def repeat(term: Term, least: int = 0, most: int | None = None) -> Term:
    """Returns the strings that join `least` to `most` strings of a term; None: no limit."""
    if most == 0 or term is EMPTY:
        return EMPTY
    if (least, most) == (1, 1):
        return term
    if term is NOTHING:
        return EMPTY if least == 0 else NOTHING
    if term.has_empty:
        least = 0
    return _make("repeat", (term, least, most), least == 0)


def machine(step: Callable[[Any], Iterable[tuple[int, Any]]], is_final: Callable[[Any], bool], state: Any) -> Term:
    """Returns the strings that an automaton accepts from a state; `step` returns sets of bytes with the next states."""
    return _make("machine", (step, is_final, state), is_final(state))


def _concat_edges(head: Term, tail: Term) -> list[tuple[int, Term]]:
    edges = [(mask, _pair(term, tail)) for mask, term in head.edges()]
    return _overlay([edges, tail.edges()], union) if head.has_empty else edges


def _repeat_edges(term: Term, least: int, most: int | None) -> list[tuple[int, Term]]:
    remaining = repeat(term, max(least - 1, 0), None if most is None else most - 1)
    return [(mask, _pair(after, remaining)) for mask, after in term.edges()]


def _intersect_edges(terms: frozenset[Term]) -> list[tuple[int, Term]]:
    cells: list[tuple[int, tuple[Term, ...]]] = [(ALL_BYTES, ())]
    for term in terms:
        split_cells = []
        for mask, afters in cells:
            for part, after in term.edges():
                if mask & part:
                    split_cells.append((mask & part, (*afters, after)))
        cells = split_cells
    return _join((mask, intersect(*afters)) for mask, afters in cells)


def _complement_edges(term: Term) -> list[tuple[int, Term]]:
    edges = [(mask, complement(after)) for mask, after in term.edges()]
    impossible = ALL_BYTES & ~reduce(int.__or__, (mask for mask, _ in edges), 0)
    if impossible:
        edges.append((impossible, ANYTHING))
    return _join(edges)


def _overlay(lists: Iterable[list[tuple[int, Term]]], combine: Callable[..., Term]) -> list[tuple[int, Term]]:
    """Returns disjoint sets of bytes, each with the combination of the terms that follow it in the lists."""
    cells: list[tuple[int, tuple[Term, ...]]] = []
    for edges in lists:
        split_cells = []
        for mask, afters in cells:
            for part, after in edges:
                if mask & part:
                    split_cells.append((mask & part, (*afters, after)))
                    mask &= ~part
            if mask:
                split_cells.append((mask, afters))
        covered = reduce(int.__or__, (mask for mask, _ in cells), 0)
        split_cells += [(part & ~covered, (after,)) for part, after in edges if part & ~covered]
        cells = split_cells
    return _join((mask, combine(*afters)) for mask, afters in cells)


def _join(edges: Iterable[tuple[int, Term]]) -> list[tuple[int, Term]]:
    """Merges edges that lead to the same term."""
    masks: dict[Term, int] = {}
    for mask, term in edges:
        masks[term] = masks.get(term, 0) | mask
    return [(mask, term) for term, mask in masks.items()]


EDGES: dict[str, Callable[..., Iterable[tuple[int, Term]]]] = {
    "byte": lambda mask: [(mask, EMPTY)] if mask else [],
    "literal": lambda text: [(1 << text[0], literal(text[1:]))] if text else [],
    "concat": _concat_edges,
    "union": lambda terms: _overlay([term.edges() for term in terms], union),
    "intersect": _intersect_edges,
    "complement": _complement_edges,
    "repeat": _repeat_edges,
    "machine": lambda step, is_final, state: [(mask, machine(step, is_final, after)) for mask, after in step(state)],
}


def follow(term: Term, text: bytes) -> Term:
    """Returns the term after a string."""
    for value in text:
        term = next((after for mask, after in term.edges() if mask >> value & 1), NOTHING)
    return term


def contains(term: Term, text: bytes) -> bool:
    """Returns whether a string is in a set."""
    return follow(term, text).has_empty


def walk(term: Term, most: int) -> Iterator[Term]:
    """Yields the states of a term's automaton, each once. Raises TooLarge for more than `most`."""
    seen = {term}
    unread = [term]
    while unread:
        state = unread.pop()
        yield state
        for _, after in state.edges():
            if after not in seen:
                if len(seen) == most:
                    raise TooLarge
                seen.add(after)
                unread.append(after)


@cache
def is_nothing(term: Term, most: int = 20_000) -> bool:
    """Returns whether a set has no strings. Raises TooLarge for a large automaton."""
    return not any(state.has_empty for state in walk(term, most))
