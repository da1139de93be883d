"""Texts of a schema's JSON values, in one form for each value.

After a comma or colon there may be one space, elsewhere none. Characters are escaped only if JSON requires it. Numbers may
have a fraction of any length and, if a schema does not limit their value, an exponent of up to two digits. Integers have
neither. Keys are in the order of `properties` and `required`; other keys follow. If a schema has `properties` or
`patternProperties`, objects only have keys that these, `required` or `additionalProperties` name.
"""

import decimal
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import getitem
from typing import Any

from referencing import Registry
from referencing.jsonschema import DRAFT202012

from treeflash_jax.constraints.compiler.arrays import array_texts
from treeflash_jax.constraints.compiler.atoms import (
    NUMBERS,
    Atom,
    Contains,
    Items,
    NumberIn,
    OfType,
    OneOf,
    SchemaLocation,
    Subschema,
    TextIn,
    Values,
    types_of,
)
from treeflash_jax.constraints.compiler.characters import quoted, texts
from treeflash_jax.constraints.compiler.json_texts import EXACT, QUOTE, cover, key_text, nesting, type_of, value_text
from treeflash_jax.constraints.compiler.numerals import DECIMALS, EXPONENTS, FRACTIONS, INTEGERS
from treeflash_jax.constraints.compiler.objects import object_texts
from treeflash_jax.constraints.compiler.refusals import Refused
from treeflash_jax.constraints.compiler.schema_reader import SchemaReader
from treeflash_jax.constraints.compiler.terms import (
    ANYTHING,
    NOTHING,
    Term,
    complement,
    concat,
    intersect,
    is_nothing,
    literal,
    union,
)

ANY_TEXT = texts(quoted)
LITERALS = {"null": (None,), "boolean": (True, False)}
BEGINS = {"array": b"[", "object": b"{"}


def schema_texts(schema: Any, depth: int, *steps: str) -> Term:
    """Returns the JSON texts of a schema's values.

    Args:
      *steps: keys from the document `schema` to the schema to read, if it is inside the document.
      depth: largest nesting of arrays and objects if the schema sets no limit, or contains itself.

    Raises Refused for a schema that cannot be followed, and TooLarge for too many states.
    """
    if not isinstance(schema, dict | bool):
        raise Refused(f"{schema!r} is no JSON schema")
    resource = DRAFT202012.create_resource(schema)
    uri = schema.get("$id", "") if isinstance(schema, dict) else ""
    if not isinstance(uri, str):
        raise Refused(f"$id {uri!r} is no text", "#")
    resolver = Registry().with_resource(uri, resource).resolver(uri)
    text = json.dumps(schema, default=str)
    anchors = Counter(json.loads(name) for name in re.findall(r'"\$dynamicAnchor": ("[^"]*")', text))
    reader = SchemaReader("$dynamicRef" in text, anchors, lambda a, b: is_nothing(bounding.write_atoms((*a, *b), 1)))
    bounding = Writer(reader, is_superset=True)
    with decimal.localcontext(EXACT):  # limits are exact
        place = SchemaLocation(resolver, "#", is_resolved=True)
        part = Subschema(reduce(getitem, steps, schema), place.inside(*steps) if steps else place)
        return Writer(reader).write([part], depth)


@dataclass
class Writer:
    """Writes the values of schemas as texts.

    Attributes:
      is_superset: whether it writes a superset of all texts of the values, instead of one form of each value. Two schemas
        have no value in common if their supersets have no text in common.
    """

    reader: SchemaReader
    is_superset: bool = False
    _known: dict[tuple, Term] = field(default_factory=dict)
    _open: set[frozenset[Atom]] = field(default_factory=set)  # atoms of the values around the current value

    def write(self, parts: Sequence[Subschema], depth: int) -> Term:
        """Returns the texts of values that satisfy all parts."""
        place = parts[0].place if parts else None
        try:
            alternatives = self.reader.combine(map(self.reader.read, parts), place)
            return union(*(self.write_atoms(atoms, depth) for atoms in alternatives))
        except Refused as error:
            raise Refused(error.what, error.path or place and place.path) from None

    def write_atoms(self, atoms: Iterable[Atom], depth: int) -> Term:
        """Returns the texts of values that have all atoms."""
        atoms = tuple(atom for atom in dict.fromkeys(atoms) if not (self.is_superset and atom.is_approximate))
        key = frozenset(atoms)
        if (key, depth) in self._known:
            return self._known[key, depth]
        is_repeated = key in self._open and any(isinstance(atom, Items | Contains | Values) for atom in atoms)
        if depth <= 0 and is_repeated:
            return ANYTHING if self.is_superset else NOTHING
        self._open.add(key)
        try:
            term = self._write(atoms, depth)
        finally:
            if not is_repeated:
                self._open.discard(key)
        if depth > 0:  # at depth 0, the result depends on the values around
            self._known[key, depth] = term
        return term

    def _write(self, atoms: tuple[Atom, ...], depth: int) -> Term:
        types = types_of(atoms)
        listed = next((atom for atom in atoms if isinstance(atom, OneOf) and not atom.is_negated), None)
        if listed:
            write_value = cover if self.is_superset else value_text
            term = union(*(write_value(value) for value in listed.values if type_of(value) in types))
            other_atoms = [atom for atom in atoms if atom is not listed]
            if all(isinstance(atom, OfType) for atom in other_atoms):
                return term
            deepest = max(depth, 1 + max(map(nesting, listed.values), default=0))  # listed values are not cut
            return intersect(term, self.write_atoms(other_atoms, deepest))
        if depth <= 0 and len(types) > 1 and not self.is_superset:  # items and keys then need an atom
            types -= {"array", "object"} - {atom.kind for atom in atoms}

        def write_inner(parts: Sequence[Subschema]) -> Term:
            return self.write(parts, depth - 1)

        terms = [value_text(x) for kind, values in LITERALS.items() if kind in types for x in values]
        if types & NUMBERS:
            terms.append(_number_texts(types, atoms))
        if "string" in types:
            terms.append(concat(QUOTE, _string_texts(atoms), QUOTE))
        if self.is_superset and depth <= 0:
            terms += [concat(literal(begin), ANYTHING) for kind, begin in BEGINS.items() if kind in types]
            types -= {*BEGINS}
        if "array" in types:
            terms.append(array_texts(atoms, write_inner))
        if "object" in types:
            terms.append(object_texts(atoms, write_inner, self._key_texts, self.is_superset))
        limits = []
        for atom in atoms:
            if isinstance(atom, OneOf) and atom.is_negated:
                limits += [complement(cover(value)) for value in atom.values]
        return intersect(union(*terms), *limits)

    def _key_texts(self, part: Subschema) -> Term:
        """Returns the keys, without quotes, that satisfy a schema."""
        terms = []
        for atoms in self.reader.read(part):
            if "string" not in types_of(atoms):
                continue
            limits = []
            for atom in atoms:
                if isinstance(atom, OneOf):
                    listed = union(*map(key_text, atom.values))
                    limits.append(complement(listed) if atom.is_negated else listed)
            terms.append(intersect(_string_texts(atoms), *limits))
        return union(*terms)


def _string_texts(atoms: Iterable[Atom]) -> Term:
    """Returns the texts of strings, without quotes."""
    return intersect(ANY_TEXT, *(atom.texts for atom in atoms if isinstance(atom, TextIn)))


def _number_texts(types: frozenset[str], atoms: Iterable[Atom]) -> Term:
    terms = [atom.numbers for atom in atoms if isinstance(atom, NumberIn)]
    if types >= NUMBERS:
        return intersect(DECIMALS, *terms) if terms else EXPONENTS
    return intersect(INTEGERS if "integer" in types else FRACTIONS, *terms)
