"""Keywords that constrain values of one type, read as atoms, or as the ways to violate them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from treeflash_jax.constraints.compiler.atoms import (
    EVERY_TYPE,
    NUMBERS,
    TYPES,
    Alternatives,
    Atom,
    Contains,
    Items,
    KeySet,
    KeysIn,
    LengthIn,
    NumberIn,
    OneOf,
    Required,
    SchemaLocation,
    SizeIn,
    Subschema,
    TextIn,
    Unique,
    Values,
    only,
)  # fmt: skip
from treeflash_jax.constraints.compiler.characters import quoted, texts
from treeflash_jax.constraints.compiler.numerals import Bounds, Number, between, multiples
from treeflash_jax.constraints.compiler.patterns import search
from treeflash_jax.constraints.compiler.refusals import Refused
from treeflash_jax.constraints.compiler.terms import Term, complement
from treeflash_jax.constraints.compiler.text_formats import format_texts

ALWAYS: Alternatives = [()]  # every value satisfies these
NEVER: Alternatives = []  # no value satisfies these


def _requirement(
    kind: str | Iterable[str], holds: Atom, fails: Sequence[tuple[Atom, ...]], is_negated: bool
) -> Alternatives:
    """Returns the alternatives of a keyword: its atom, or if it is negated, the ways to violate it with its type."""
    return [only(kind, *atoms) for atoms in fails] if is_negated else [(holds,)]


def _type(value: Any, schema: dict, place: SchemaLocation, is_negated: bool) -> Alternatives:
    names = [value] if isinstance(value, str) else value
    if not names:
        raise TypeError
    unknown = [name for name in names if name not in TYPES]
    if unknown:
        raise Refused(f"type {unknown[0]!r} is unknown")
    types = frozenset().union(*(TYPES[name] for name in names))
    types = EVERY_TYPE - types if is_negated else types
    return [only(types)] if types else []


def _enum(value: Any, schema: dict, place: SchemaLocation, is_negated: bool) -> Alternatives:
    if not isinstance(value, list):
        raise TypeError
    return [(OneOf(tuple(value), is_negated),)]


def _const(value: Any, schema: dict, place: SchemaLocation, is_negated: bool) -> Alternatives:
    return [(OneOf((value,), is_negated),)]


def _text(make: Callable[[Any], Term | None]) -> Callable[..., Alternatives]:
    """Returns the reader of a keyword of strings."""

    def read(value: Any, schema: dict, place: SchemaLocation, is_negated: bool) -> Alternatives:
        term = make(value)
        if term is None:
            return NEVER if is_negated else ALWAYS
        return _requirement("string", TextIn(term), [(TextIn(complement(term)),)], is_negated)

    return read


def _format(value: str, schema: dict, place: SchemaLocation, is_negated: bool) -> Alternatives:
    if not isinstance(value, str):
        raise TypeError
    term = format_texts(value, quoted)
    if term is None:
        return NEVER if is_negated else ALWAYS
    if is_negated:
        raise Refused(f"format {value!r} cannot be followed where a schema must not hold")
    return [(TextIn(term, is_approximate=True),)]


def _number(make: Callable[[Number], Term]) -> Callable[..., Alternatives]:
    """Returns the reader of a keyword of numbers."""

    def read(value: Number, schema: dict, place: SchemaLocation, is_negated: bool) -> Alternatives:
        if isinstance(value, bool) or not isinstance(value, Number):
            raise TypeError
        term = make(value)
        return _requirement(NUMBERS, NumberIn(term), [(NumberIn(complement(term)),)], is_negated)

    return read


def _multiple(value: Number) -> Term:
    if value <= 0:
        raise ValueError
    return multiples(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TypeError
    return value


def _limit(kind: str, make: type[Atom], is_least: bool) -> Callable[..., Alternatives]:
    """Returns the reader of a keyword that limits the size of arrays or objects."""

    def read(value: Any, schema: dict, place: SchemaLocation, is_negated: bool) -> Alternatives:
        value = _count(value)
        if is_least:
            return _requirement(kind, make(value, None), [(make(0, value - 1),)] if value else [], is_negated)
        return _requirement(kind, make(0, value), [(make(value + 1, None),)], is_negated)

    return read


def _items(value: Any, schema: dict, place: SchemaLocation, is_negated: bool) -> Alternatives:
    if isinstance(value, list):
        raise TypeError
    first = len(schema.get("prefixItems", []))
    part = Subschema(value, place.inside("items"))
    return _requirement("array", Items(first, None, part), [(Contains(first, part.opposite(), 1, None),)], is_negated)


def _prefix_items(value: list, schema: dict, place: SchemaLocation, is_negated: bool) -> Alternatives:
    parts = [Subschema(item, place.inside("prefixItems", i)) for i, item in enumerate(value)]
    if is_negated:
        return [only("array", LengthIn(i + 1, None), Items(i, i, part.opposite())) for i, part in enumerate(parts)]
    return [tuple(Items(i, i, part) for i, part in enumerate(parts))]


def _contains(value: Any, schema: dict, place: SchemaLocation, is_negated: bool) -> Alternatives:
    least = _count(schema.get("minContains", 1))
    most = _count(schema["maxContains"]) if "maxContains" in schema else None
    part = Subschema(value, place.inside("contains"))
    fails = [(Contains(0, part, 0, least - 1),)] if least else []
    if most is not None:
        fails.append((Contains(0, part, most + 1, None),))
    return _requirement("array", Contains(0, part, least, most), fails, is_negated)


def _unique(value: Any, schema: dict, place: SchemaLocation, is_negated: bool) -> Alternatives:
    if not value:
        return NEVER if is_negated else ALWAYS
    if is_negated:
        raise Refused("uniqueItems cannot be followed where a schema must not hold")
    return [(Unique(),)]


def required(value: list[str], schema: dict, place: SchemaLocation, is_negated: bool) -> Alternatives:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise TypeError
    if is_negated:
        return [only("object", Required(name, True)) for name in value]
    return [tuple(map(Required, value))]


def _properties(value: dict[str, Any], schema: dict, place: SchemaLocation, is_negated: bool) -> Alternatives:
    parts = [(name, Subschema(part, place.inside("properties", name))) for name, part in value.items()]
    if is_negated:
        return [only("object", Required(name), Values(KeySet((name,)), part.opposite())) for name, part in parts]
    return [tuple(Values(KeySet((name,)), part) for name, part in parts)]


def _pattern_properties(value: dict[str, Any], schema: dict, place: SchemaLocation, is_negated: bool) -> Alternatives:
    parts = [(KeySet(None, name), Subschema(part, place.inside("patternProperties", name))) for name, part in value.items()]
    if is_negated:
        return [only("object", Values(keys, part.opposite(), True)) for keys, part in parts]
    return [tuple(Values(keys, part) for keys, part in parts)]


def _additional(value: Any, schema: dict, place: SchemaLocation, is_negated: bool) -> Alternatives:
    covered = (
        KeySet(tuple(schema.get("properties", {}))),
        *(KeySet(None, name) for name in schema.get("patternProperties", {})),
    )
    keys = KeySet(covered=covered)
    part = Subschema(value, place.inside("additionalProperties"))
    return _requirement("object", Values(keys, part), [(Values(keys, part.opposite(), True),)], is_negated)


def _property_names(value: Any, schema: dict, place: SchemaLocation, is_negated: bool) -> Alternatives:
    part = Subschema(value, place.inside("propertyNames"))
    return _requirement("object", KeysIn(part), [(KeysIn(part.opposite(), True),)], is_negated)


def unevaluated(name: str, atoms: Sequence[Atom], part: Subschema) -> tuple[Atom, ...]:
    """Returns the atoms of unevaluatedItems or unevaluatedProperties, given the atoms beside it that evaluate."""
    if name == "unevaluatedProperties":
        covered = tuple(atom.keys for atom in atoms if isinstance(atom, Values) and atom.evaluates)
        return (Values(KeySet(covered=covered), part),)
    if name != "unevaluatedItems":
        raise Refused(f"keyword {name!r} cannot be followed", part.place.path)
    items = [atom for atom in atoms if isinstance(atom, Items) and atom.evaluates]
    if any(atom.last is None for atom in items):
        return ()
    return (Items(max((atom.last + 1 for atom in items), default=0), None, part),)


KEYWORDS = {
    "type": _type, "enum": _enum, "const": _const,
    "minLength": _text(lambda n: texts(quoted, _count(n))), "maxLength": _text(lambda n: texts(quoted, 0, _count(n))),
    "pattern": _text(lambda pattern: search(pattern, quoted)), "format": _format,
    "minimum": _number(lambda x: between(Bounds(least=x))), "maximum": _number(lambda x: between(Bounds(most=x))),
    "exclusiveMinimum": _number(lambda x: between(Bounds(least=x, is_least_strict=True))),
    "exclusiveMaximum": _number(lambda x: between(Bounds(most=x, is_most_strict=True))), "multipleOf": _number(_multiple),
    "minItems": _limit("array", LengthIn, True), "maxItems": _limit("array", LengthIn, False), "items": _items,
    "prefixItems": _prefix_items, "contains": _contains, "uniqueItems": _unique, "required": required,
    "properties": _properties, "patternProperties": _pattern_properties, "additionalProperties": _additional,
    "propertyNames": _property_names,
    "minProperties": _limit("object", SizeIn, True), "maxProperties": _limit("object", SizeIn, False),
}  # fmt: skip
