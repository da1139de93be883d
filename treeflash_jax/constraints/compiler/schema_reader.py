"""JSON schemas as alternatives of atoms.

A schema becomes a list of alternatives (`anyOf`, `oneOf`, `if`, a keyword of `not` that has to fail). Each alternative is a
tuple of atoms that hold together (`allOf`, `$ref`). The negation of a schema becomes alternatives, too. So no set of JSON
texts is ever complemented, which repeated keys and the many ways to write a number would make wrong.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from treeflash_jax.constraints.compiler.atoms import (
    EVERY_TYPE,
    Alternatives,
    Atom,
    Items,
    Required,
    SchemaLocation,
    Subschema,
    Values,
    only,
    types_of,
)
from treeflash_jax.constraints.compiler.refusals import Refused
from treeflash_jax.constraints.compiler.type_keywords import ALWAYS, KEYWORDS, NEVER, required, unevaluated

ANNOTATIONS = frozenset(
    """title description default example examples deprecated readOnly writeOnly discriminator $schema $id $anchor
    $dynamicAnchor $comment $defs definitions $vocabulary contentEncoding contentMediaType contentSchema""".split()
)
COMPANIONS = "then", "else", "minContains", "maxContains"  # keywords that are read with another one
FEW_ALTERNATIVES, MOST_ALTERNATIVES = 16, 1_000  # above the first number, alternatives without values are removed


@dataclass
class SchemaReader:
    """Reads schemas as alternatives of atoms, each schema once.

    Attributes:
      has_scope: whether references depend on the path of references before them ($dynamicRef).
      dynamic_anchors: number of times that each $dynamicAnchor is defined.
      are_disjoint: function that returns whether no value satisfies both of two alternatives.
    """

    has_scope: bool
    dynamic_anchors: Counter[str]
    are_disjoint: Callable[[tuple[Atom, ...], tuple[Atom, ...]], bool]
    _known: dict[tuple, Alternatives | None] = field(default_factory=dict)

    def read(self, part: Subschema) -> Alternatives:
        """Returns the alternatives of a schema, or of its negation.

        Raises Refused for anything that is not a schema, for a schema that cannot be followed, and for one that contains
        itself without a value around it.
        """
        scope = tuple(dict.fromkeys(uri for uri, _ in part.place.resolver.dynamic_scope())) if self.has_scope else ()
        key = id(part.schema), part.is_negated, scope
        if isinstance(part.schema, bool):
            return ALWAYS if part.schema != part.is_negated else NEVER
        if key not in self._known:
            self._known[key] = None
            self._known[key] = self._read(*part)
        if self._known[key] is None:
            raise Refused("a schema that contains itself without a value around it cannot be followed", part.place.path)
        return self._known[key]

    def combine(self, parts: Iterable[Alternatives], place: SchemaLocation) -> Alternatives:
        """Returns all combinations of one alternative from each part, except those that allow no type."""
        combined = ALWAYS
        for alternatives in parts:
            is_product = len(combined) > 1 and len(alternatives) > 1
            combined = [(*a, *b) for a in combined for b in alternatives if types_of((*a, *b))]
            if is_product and len(combined) > FEW_ALTERNATIVES:
                combined = [atoms for atoms in combined if not self.are_disjoint(atoms, ())]
            if is_product and len(combined) > MOST_ALTERNATIVES:
                raise Refused(f"more than {MOST_ALTERNATIVES} alternatives cannot be followed", place and place.path)
        return combined

    def _read(self, schema: Any, place: SchemaLocation, is_negated: bool) -> Alternatives:
        if not isinstance(schema, dict):
            raise Refused(f"{schema!r} is no JSON schema", place.path)
        if not isinstance(schema.get("$id", ""), str):
            raise Refused(f"$id {schema['$id']!r} is no text", place.path)
        if "$id" in schema and not place.is_resolved:
            place = place._replace(resolver=place.resolver.in_subresource(DRAFT202012.create_resource(schema)))
        late = [name for name in schema if name.startswith("unevaluated")]
        parts = []
        for name in schema:
            if name not in (*late, *COMPANIONS) and name not in ANNOTATIONS and not name.startswith("x-"):
                parts.append(self._read_keyword(name, schema, place, is_negated))
        if is_negated and late:
            raise Refused(f"{late[0]} cannot be followed where a schema must not hold", place.path)
        if is_negated:  # a schema that fails evaluates no items or keys
            return [tuple(map(_without_evaluation, atoms)) for atoms in itertools.chain(*parts)]
        alternatives = self.combine(parts, place)
        for name in late:
            alternatives = [
                (*atoms, *unevaluated(name, atoms, Subschema(schema[name], place.inside(name)))) for atoms in alternatives
            ]
        return alternatives

    def _read_keyword(self, name: str, schema: dict[str, Any], place: SchemaLocation, is_negated: bool) -> Alternatives:
        value = schema[name]
        try:
            if name in KEYWORDS:
                return KEYWORDS[name](value, schema, place, is_negated)
            if name in APPLICATORS:
                return APPLICATORS[name](self, value, schema, place, is_negated)
        except Refused as error:
            raise Refused(error.what, error.path or place.inside(name).path) from None
        except (TypeError, ValueError, AttributeError, KeyError, Unresolvable):
            raise Refused(f"{name} {value!r} is no part of a JSON schema", place.path) from None
        raise Refused(f"keyword {name!r} cannot be followed", place.path)

    def read_any_of(self, value: list, schema: dict, place: SchemaLocation, is_negated: bool) -> Alternatives:
        parts = [self.read(Subschema(part, place.inside("anyOf", i), is_negated)) for i, part in enumerate(value)]
        return self.combine(parts, place) if is_negated else [*itertools.chain(*parts)]

    def read_all_of(self, value: list, schema: dict, place: SchemaLocation, is_negated: bool) -> Alternatives:
        parts = [self.read(Subschema(part, place.inside("allOf", i), is_negated)) for i, part in enumerate(value)]
        return [*itertools.chain(*parts)] if is_negated else self.combine(parts, place)

    def read_one_of(self, value: list, schema: dict, place: SchemaLocation, is_negated: bool) -> Alternatives:
        parts = [Subschema(part, place.inside("oneOf", i)) for i, part in enumerate(value)]
        holds = [self.read(part) for part in parts]
        if is_negated:
            no_part = self.combine([self.read(part.opposite()) for part in parts], place)
            two_parts = [self.combine(pair, place) for pair in itertools.combinations(holds, 2)]
            return [*no_part, *itertools.chain(*two_parts)]
        exactly_one = []
        for i, alternatives in enumerate(holds):
            for atoms in alternatives:
                others_fail = [
                    self.read(parts[j].opposite())
                    for j, other in enumerate(holds)
                    if j != i and not all(self.are_disjoint(atoms, b) for b in other)
                ]
                exactly_one += self.combine([[atoms], *others_fail], place)
        return exactly_one

    def read_not(self, value: Any, schema: dict, place: SchemaLocation, is_negated: bool) -> Alternatives:
        return self.read(Subschema(value, place.inside("not"), not is_negated))

    def read_if(self, value: Any, schema: dict, place: SchemaLocation, is_negated: bool) -> Alternatives:
        condition = Subschema(value, place.inside("if"))
        if "then" not in schema and "else" not in schema:  # every value satisfies it; it only evaluates items and keys
            return NEVER if is_negated else self.read(condition) + ALWAYS
        alternatives = []
        for name, holds in ("then", condition), ("else", condition.opposite()):
            branch = self.read(Subschema(schema.get(name, True), place.inside(name), is_negated))
            if branch:  # otherwise the condition need not be read, which may be one that cannot be negated
                alternatives += self.combine([self.read(holds), branch], place)
        return alternatives

    def read_dependent(
        self, value: dict, schema: dict, place: SchemaLocation, is_negated: bool, *, keyword: str
    ) -> Alternatives:
        if keyword == "dependencies" and is_negated:  # a keyword of older drafts; in the present draft, it never fails
            raise Refused("dependencies cannot be followed where a schema must not hold")
        parts = []
        for name, needed in value.items():
            missing = [only(EVERY_TYPE - {"object"}), only("object", Required(name, True))]
            if isinstance(needed, list):
                dependency = required(needed, schema, place, is_negated)
            else:
                dependency = self.read(Subschema(needed, place.inside(keyword, name), is_negated))
            present = self.combine([[only("object", Required(name))], dependency], place)
            parts.append(present if is_negated else missing + present)
        return [*itertools.chain(*parts)] if is_negated else self.combine(parts, place)

    def read_ref(self, value: str, schema: dict, place: SchemaLocation, is_negated: bool) -> Alternatives:
        if self.dynamic_anchors[value.partition("#")[2]] > 1:
            raise Refused(f"$ref {value!r} to one of several $dynamicAnchor cannot be followed")
        return self.read_dynamic_ref(value, schema, place, is_negated)

    def read_dynamic_ref(self, value: str, schema: dict, place: SchemaLocation, is_negated: bool) -> Alternatives:
        try:
            target = place.resolver.lookup(value)
        except Unresolvable:
            raise Refused(f"reference {value!r} names nothing in this schema", place.path) from None
        return self.read(Subschema(target.contents, SchemaLocation(target.resolver, value, is_resolved=True), is_negated))


def _without_evaluation(atom: Atom) -> Atom:
    return replace(atom, evaluates=False) if isinstance(atom, Values | Items) and atom.evaluates else atom


APPLICATORS = {  # keywords with schemas inside, or references to schemas
    "anyOf": SchemaReader.read_any_of,
    "allOf": SchemaReader.read_all_of,
    "oneOf": SchemaReader.read_one_of,
    "not": SchemaReader.read_not,
    "if": SchemaReader.read_if,
    "dependentSchemas": partial(SchemaReader.read_dependent, keyword="dependentSchemas"),
    "dependentRequired": partial(SchemaReader.read_dependent, keyword="dependentRequired"),
    "dependencies": partial(SchemaReader.read_dependent, keyword="dependencies"),
    "$ref": SchemaReader.read_ref,
    "$dynamicRef": SchemaReader.read_dynamic_ref,
}
