"""Writes the atoms of a JSON object (keys, required keys, counts) as a term: the set of the object's texts."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from treeflash_jax.constraints.compiler.atoms import Atom, KeySet, KeysIn, Required, SizeIn, Subschema, Values, size_limits
from treeflash_jax.constraints.compiler.characters import quote, quoted, texts
from treeflash_jax.constraints.compiler.json_texts import COLON, COMMA, QUOTE, key_text
from treeflash_jax.constraints.compiler.patterns import search
from treeflash_jax.constraints.compiler.refusals import Refused
from treeflash_jax.constraints.compiler.terms import (
    EMPTY,
    NOTHING,
    Term,
    complement,
    concat,
    contains,
    intersect,
    is_nothing,
    literal,
    repeat,
    union,
)

MOST_PATTERNS = 4  # largest number of patterns of keys in one object


def object_texts(
    atoms: Iterable[Atom],
    write: Callable[[Sequence[Subschema]], Term],
    key_texts: Callable[[Subschema], Term],
    is_open: bool,
) -> Term:
    """Returns the texts of the objects that have all atoms.

    Args:
      write: function that returns the texts of values that satisfy all given schemas.
      key_texts: function that returns the texts of keys that satisfy a schema, without quotes.
      is_open: whether objects may have keys that no atom covers, even if some atoms cover keys.

    Raises Refused for more patterns of keys, or more keys of any name, than can be followed.
    """
    return _Objects(write, key_texts, is_open).write_all(tuple(atoms), ())


@dataclass
class _Objects:
    """Writes objects; see `object_texts`."""

    write: Callable[[Sequence[Subschema]], Term]
    key_texts: Callable[[Subschema], Term]
    is_open: bool

    def write_all(self, atoms: tuple[Atom, ...], last: tuple[Atom, ...]) -> Term:
        """Returns the texts of objects, in which a name or the last unnamed key satisfies each atom with `is_some`.

        Args:
          last: atoms with `is_some` that the last unnamed key and its value satisfy. It has to be the last, because only
            the last value of a repeated key counts.
        """
        names = _find_names(atoms, last)
        some = next((atom for kind in (Values, KeysIn) for atom in atoms if isinstance(atom, kind) and atom.is_some), None)
        if some is None:
            return self._write_keys(atoms, last, names)
        other_atoms = tuple(atom for atom in atoms if atom is not some)
        terms = []
        for name in names:
            if self._has_key(some, name):
                terms.append(self.write_all((*other_atoms, *_with_name(some, name)), last))
        return union(*terms, self.write_all(other_atoms, (*last, some)))

    def _write_keys(self, atoms: tuple[Atom, ...], last: tuple[Atom, ...], names: list[str]) -> Term:
        """Like `write_all`, for atoms without `is_some`: named keys in order, then other keys."""
        values = [atom for atom in atoms if isinstance(atom, Values)]
        limits = [atom for atom in atoms if isinstance(atom, KeysIn)]
        required = {atom.name for atom in atoms if isinstance(atom, Required) and not atom.is_negated}
        forbidden = {atom.name for atom in atoms if isinstance(atom, Required) and atom.is_negated}
        least, most = size_limits(atoms, SizeIn)
        is_open = self.is_open or not values or least > len(names)
        other = self._pairs(values, limits, names, (), is_open)
        final = self._pairs(values, limits, names, last, is_open) if last else None
        if least > len(names) + 1 and other is not NOTHING:
            raise Refused(f"minProperties {least} with keys of any name cannot be followed")
        cap = max(1, len(names) if least or most is not None else 1)  # larger numbers of keys make no difference
        tails = [_end(count, other, final, least, most) for count in range(cap + 1)]
        for name in reversed(names):
            is_possible = name not in forbidden and all(self._has_key(atom, name) for atom in limits)
            value = self.write([atom.part for atom in values if has_key(atom.keys, name)]) if is_possible else NOTHING
            tails = _prepend(concat(QUOTE, key_text(name), QUOTE, COLON, value), name in required, tails, most)
        return concat(literal(b"{"), tails[0])

    def _has_key(self, atom: Values | KeysIn, name: str) -> bool:
        """Returns whether an atom constrains a key."""
        if isinstance(atom, Values):
            return has_key(atom.keys, name)
        return contains(self.key_texts(atom.part), quote(name).encode())

    def _pairs(
        self, values: list[Values], limits: list[KeysIn], names: list[str], last: tuple[Atom, ...], is_open: bool
    ) -> Term:
        """Returns an unnamed key with its value, which satisfy `last`."""
        final = [atom for atom in last if isinstance(atom, Values)]
        keys = [self.key_texts(atom.part) for atom in (*limits, *last) if isinstance(atom, KeysIn)]
        keys.append(complement(union(*map(key_text, names))))
        patterns = sorted({pattern for atom in (*values, *final) for pattern in _patterns(atom.keys)})
        if len(patterns) > MOST_PATTERNS:
            raise Refused(f"more than {MOST_PATTERNS} patterns of keys in one object cannot be followed")
        pairs = []
        for are_found in itertools.product((True, False), repeat=len(patterns)):
            is_found = dict(zip(patterns, are_found, strict=True))
            if not all(_has_other(atom.keys, is_found) for atom in final):
                continue
            matches = [search(p, quoted) if is_found[p] else complement(search(p, quoted)) for p in patterns]
            key = intersect(texts(quoted), *keys, *matches)
            parts = [atom.part for atom in (*values, *final) if _has_other(atom.keys, is_found)]
            if (parts or is_open) and not is_nothing(key):
                pairs.append(concat(QUOTE, key, QUOTE, COLON, self.write(parts)))
        return union(*pairs)


def _find_names(atoms: tuple[Atom, ...], last: tuple[Atom, ...]) -> list[str]:
    """Returns the names of keys: those with values, then those that are only required or forbidden."""
    values = [atom for atom in (*atoms, *last) if isinstance(atom, Values)]
    demands = [atom.name for atom in atoms if isinstance(atom, Required)]
    return [*dict.fromkeys([*(name for atom in values for name in atom.keys.all_names()), *demands])]


def _prepend(pair: Term, is_required: bool, tails: list[Term], most: int | None) -> list[Term]:
    """Returns the texts from a named key on, for each number of keys before it.

    Args:
      pair: the key with its value.
      tails: texts after the key, for each number of keys before them; the last text is also that of larger numbers.
      most: largest number of keys.
    """
    longer = []
    for count, absent in enumerate(tails):
        after = tails[min(count + 1, len(tails) - 1)] if most is None or count < most else NOTHING
        present = concat(COMMA if count else EMPTY, pair, after)
        longer.append(present if is_required else union(present, absent))
    return longer


def _end(count: int, other: Term, final: Term | None, least: int, most: int | None) -> Term:
    """Returns the texts after `count` named keys: pairs of other keys and values, the last pair, and the brace.

    Other keys may be repeated. So for the smallest number of keys, any number of them counts as one.
    """
    end = literal(b"}")
    comma = COMMA if count else EMPTY
    terms = [end] if final is None and count >= least else []
    if count + 1 >= least and (most is None or count < most):
        more = None if most is None else most - count - 1
        if final is None:
            terms.append(concat(comma, other, repeat(concat(COMMA, other), 0, more), end))
        else:
            terms.append(concat(comma, repeat(concat(other, COMMA), 0, more), final, end))
    return union(*terms)


def _with_name(some: Values | KeysIn, name: str) -> list[Atom]:
    """Returns the atoms of an object in which the key `name` satisfies `some`."""
    if isinstance(some, Values):
        return [Required(name), Values(KeySet((name,)), some.part)]
    return [Required(name)]


def _patterns(keys: KeySet) -> set[str]:
    return {keys.pattern, *(inner.pattern for inner in keys.covered)} - {None}


def _has_other(keys: KeySet, is_found: dict[str, bool]) -> bool:
    """Returns whether an unnamed key is in a set, given which patterns it matches."""
    if keys.names is not None:
        return False
    if keys.pattern is not None:
        return is_found[keys.pattern]
    return not any(_has_other(inner, is_found) for inner in keys.covered)


def has_key(keys: KeySet, name: str) -> bool:
    """Returns whether a set has a key."""
    if keys.names is not None:
        return name in keys.names
    if keys.pattern is not None:
        return contains(search(keys.pattern, quoted), quote(name).encode())
    return not any(has_key(inner, name) for inner in keys.covered)
