"""Atoms: the simple requirements that a schema consists of.

Like a keyword, an atom constrains values of one type; values of all other types satisfy it. Each schema is read once, and
an atom is equal only to itself. So a schema that contains itself is recognised by its atoms.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, dataclass_transform

from treeflash_jax.constraints.compiler.terms import Term

TYPES = {name: {name} for name in ("null", "boolean", "integer", "string", "array", "object")}
TYPES["number"] = {"integer", "fraction"}
EVERY_TYPE = frozenset().union(*TYPES.values())
NUMBERS = frozenset(TYPES["number"])


class SchemaLocation(NamedTuple):
    """Position of a schema in its document.

    Attributes:
      resolver: resolver (of the package `referencing`) for references in this schema.
      path: JSON pointer of the schema, for messages.
      is_resolved: whether the resolver already uses the schema's $id, if any, as its base.
    """

    resolver: Any
    path: str
    is_resolved: bool = False

    def inside(self, *steps: str | int) -> "SchemaLocation":
        names = [str(step).replace("~", "~0").replace("/", "~1") for step in steps]
        return SchemaLocation(self.resolver, "/".join([self.path, *names]))


class Subschema(NamedTuple):
    """A schema inside a schema, or its negation."""

    schema: Any
    place: SchemaLocation
    is_negated: bool = False

    def opposite(self) -> "Subschema":
        return self._replace(is_negated=not self.is_negated)


class Atom:
    """A requirement of values.

    Attributes:
      kind: "array" or "object" if it constrains items or keys.
      is_approximate: whether only some of the values that satisfy it have texts.
    """

    kind: ClassVar[str | None] = None
    is_approximate = False


@dataclass_transform(eq_default=False, frozen_default=True)
def atom_type(cls: type) -> type:
    """Makes a class a frozen dataclass whose objects are equal only to themselves."""
    return dataclass(frozen=True, eq=False)(cls)


@atom_type
class OfType(Atom):
    """The value's type is one of these; numbers are integers or fractions."""

    types: frozenset[str]


@atom_type
class OneOf(Atom):
    """The value is one of these, or none of them."""

    values: tuple[Any, ...]
    is_negated: bool

    @property
    def is_approximate(self) -> bool:
        return self.is_negated and any(isinstance(value, list | dict) for value in self.values)


@atom_type
class TextIn(Atom):
    """A string is in a set; its texts are those inside the quotes."""

    texts: Term
    is_approximate: bool = False


@atom_type
class NumberIn(Atom):
    """A number is in a set; its texts have no exponents."""

    numbers: Term


@atom_type
class LengthIn(Atom):
    """The number of items is between `least` and `most`; None: no limit."""

    kind = "array"

    least: int
    most: int | None


@atom_type
class Items(Atom):
    """The items from `first` to `last` (None: the last item) satisfy a schema."""

    kind = "array"

    first: int
    last: int | None
    part: Subschema
    evaluates: bool = True


@atom_type
class Contains(Atom):
    """Between `least` and `most` of the items from `first` on satisfy a schema."""

    kind = "array"
    is_approximate = True

    first: int
    part: Subschema
    least: int
    most: int | None


@atom_type
class Unique(Atom):
    """No two items are equal."""

    kind = "array"
    is_approximate = True


@atom_type
class Required(Atom):
    """An object has a key, or does not have it."""

    kind = "object"

    name: str
    is_negated: bool = False


@atom_type
class KeySet:
    """A set of keys: the keys in `names`, the keys that match `pattern`, or all keys if both are None.

    Attributes:
      covered: sets whose keys are excluded from this set.
    """

    names: tuple[str, ...] | None = None
    pattern: str | None = None
    covered: tuple["KeySet", ...] = ()

    def all_names(self) -> list[str]:
        """Returns the names that the set lists, and those that its excluded sets list."""
        return [*(self.names or ()), *(name for keys in self.covered for name in keys.all_names())]


@atom_type
class Values(Atom):
    """All values of these keys satisfy a schema; with `is_some`, at least one value does."""

    kind = "object"

    keys: KeySet
    part: Subschema
    is_some: bool = False
    evaluates: bool = True

    @property
    def is_approximate(self) -> bool:
        return self.is_some


@atom_type
class KeysIn(Atom):
    """All keys of an object satisfy a schema; with `is_some`, at least one key does."""

    kind = "object"
    is_approximate = True

    part: Subschema
    is_some: bool = False


@atom_type
class SizeIn(Atom):
    """The number of keys is between `least` and `most`; None: no limit."""

    kind = "object"
    is_approximate = True

    least: int
    most: int | None


Alternatives = list[tuple[Atom, ...]]  # a value satisfies all atoms of one of the tuples


def types_of(atoms: Iterable[Atom]) -> frozenset[str]:
    """Returns the types that all atoms allow."""
    types = EVERY_TYPE
    for atom in atoms:
        if isinstance(atom, OfType):
            types &= atom.types
    return types


def only(kind: str | Iterable[str], *atoms: Atom) -> tuple[Atom, ...]:
    """Returns an alternative that requires a type (or one of several), besides other atoms."""
    return (OfType(frozenset([kind] if isinstance(kind, str) else kind)), *atoms)


def size_limits(atoms: Iterable[Atom], kind: type[LengthIn] | type[SizeIn]) -> tuple[int, int | None]:
    """Returns the smallest and the largest size that all atoms of a kind allow; None: no limit."""
    sizes = [atom for atom in atoms if isinstance(atom, kind)]
    most = [atom.most for atom in sizes if atom.most is not None]
    return max((atom.least for atom in sizes), default=0), min(most, default=None)
