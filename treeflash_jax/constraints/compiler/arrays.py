"""Writes the atoms of a JSON array (items, counts, uniqueness) as a term: the set of the array's texts."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import NamedTuple

from treeflash_jax.constraints.compiler.atoms import Atom, Contains, Items, LengthIn, Subschema, Unique, size_limits
from treeflash_jax.constraints.compiler.json_texts import COMMA, finite_values
from treeflash_jax.constraints.compiler.refusals import Refused
from treeflash_jax.constraints.compiler.terms import EMPTY, NOTHING, Term, concat, intersect, literal, repeat, union

MOST_COUNTED = 1_000  # largest number of items if some of them are counted


def array_texts(atoms: Iterable[Atom], write: Callable[[Sequence[Subschema]], Term]) -> Term:
    """Returns the texts of the arrays that have all atoms.

    Args:
      write: function that returns the texts of items that satisfy all given schemas.

    Raises Refused if items must be unique, but may have infinitely many values.
    """
    least, most = size_limits(atoms, LengthIn)
    if most is not None and most < least:
        return NOTHING
    items = [atom for atom in atoms if isinstance(atom, Items)]
    kinds = [atom for atom in atoms if isinstance(atom, Contains)]
    ends = [atom.first if atom.last is None else atom.last + 1 for atom in items]
    alike = max([*ends, *(atom.first for atom in kinds)], default=0)  # index from which all items have the same schemas

    def item(index: int, more: Sequence[Subschema] = ()) -> Term:
        parts = [atom.part for atom in items if atom.first <= index and (atom.last is None or index <= atom.last)]
        return write([*parts, *more])

    is_unique = any(isinstance(atom, Unique) for atom in atoms) and most not in (0, 1)
    if kinds or is_unique:
        return concat(literal(b"["), _Counter(item, kinds, is_unique, least, most, alike).tail())
    alike = max(alike, 1)  # there is no comma before the first item
    body = EMPTY
    if most is None or most > alike:
        body = repeat(concat(COMMA, item(alike)), max(least - alike, 0), None if most is None else most - alike)
    for index in reversed(range(alike if most is None else min(alike, most))):
        part = concat(COMMA if index else EMPTY, item(index), body)
        body = part if index < least else union(EMPTY, part)
    return concat(literal(b"["), body, literal(b"]"))


class _State(NamedTuple):
    """Position in an array with counted items.

    Attributes:
      index: number of items so far, up to the largest number that makes a difference.
      counts: number of items of each kind so far, with the same kind of limit.
      used: the items so far, if they have to be unique.
    """

    index: int
    counts: tuple[int, ...]
    used: frozenset[str] = frozenset()


class _Counter:
    """Writes arrays in which items of some kinds are counted, or all items are unique."""

    def __init__(
        self, item: Callable[..., Term], kinds: list[Contains], is_unique: bool, least: int, most: int | None, alike: int
    ):
        self.item = item
        self.kinds = kinds
        self.least = least
        self.most = most
        self.alike = alike
        self.caps = [atom.least if atom.most is None else atom.most + 1 for atom in kinds]
        self.last = max(alike, least, 1, 0 if most is None else most + 1)
        if max(self.last, *self.caps, 0) > MOST_COUNTED:
            raise Refused(f"an array of more than {MOST_COUNTED:,} items some of which are counted cannot be followed")
        self.values = None
        if is_unique:
            self.values = {}
            for index in range(alike + 1):
                for key, texts in finite_values(item(index)).items():
                    self.values[key] = union(self.values.get(key, NOTHING), texts)
        self._tail = cache(self._write_tail)

    def tail(self) -> Term:
        """Returns the texts after the opening bracket."""
        return self._tail(_State(0, (0,) * len(self.kinds)))

    def _write_tail(self, state: _State) -> Term:
        tails: list[Term] = []
        loops: list[Term] = []
        if state.index >= self.least and all(n >= kind.least for kind, n in zip(self.kinds, state.counts, strict=True)):
            tails.append(literal(b"]"))
        for term, after in self._choices(state):
            if term is NOTHING or not self._is_possible(after):
                continue
            part = concat(COMMA if state.index else EMPTY, term)
            if after == state:
                loops.append(part)
            else:
                tails.append(concat(part, self._tail(after)))
        return concat(repeat(union(*loops)), union(*tails))

    def _is_possible(self, state: _State) -> bool:
        is_short = self.most is None or state.index <= self.most
        return is_short and all(
            kind.most is None or n <= kind.most for kind, n in zip(self.kinds, state.counts, strict=True)
        )

    def _choices(self, state: _State) -> Iterable[tuple[Term, _State]]:
        """Yields the terms of the next item, each with the state after it.

        An item that is not counted may still be of a counted kind, unless that kind has a largest number.
        """
        open_kinds = [kind for kind in self.kinds if state.index >= kind.first]
        for counted in itertools.product((True, False), repeat=len(open_kinds)):
            is_counted = dict(zip(open_kinds, counted, strict=True))
            parts = [kind.part for kind in open_kinds if is_counted[kind]]
            parts += [kind.part.opposite() for kind in open_kinds if not is_counted[kind] and kind.most is not None]
            counts = tuple(
                min(n + is_counted.get(kind, False), cap)
                for kind, n, cap in zip(self.kinds, state.counts, self.caps, strict=True)
            )
            term = self.item(min(state.index, self.alike), parts)
            after = _State(min(state.index + 1, self.last), counts, state.used)
            if self.values is None:
                yield term, after
            else:
                for key in self.values.keys() - state.used:
                    yield intersect(term, self.values[key]), after._replace(used=state.used | {key})
