"""JSON schemas as alternatives of atoms.

A schema becomes a list of alternatives (`anyOf`, `oneOf`, `if`, a keyword of `not` that has to fail), each a tuple of
atoms that hold together (`allOf`, `$ref`). What violates a schema has alternatives as well, so that no set of JSON texts is
ever complemented: repeated keys and the ways to write a number have no part in it.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from treeflash_jax.constraints.compiler.atoms import (
    EVERY_TYPE,
    Alternatives,
    Atom,
    Items,
    Part,
    Place,
    Required,
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
COMPANIONS = "then", "else", "minContains", "maxContains"  # read with another keyword
FEW_ALTERNATIVES, MOST_ALTERNATIVES = 16, 1_000  # above the first number, those without values are sought and left out


@dataclass
class Reader:
    """Reads schemas as alternatives of atoms, each schema once.

    Attributes:
      has_scope: whether references depend on the way to them ($dynamicRef).
      dynamic_anchors: number of places of each $dynamicAnchor.
      are_disjoint: returns whether no value has the atoms of both of two alternatives.
    """

    has_scope: bool
    dynamic_anchors: Counter[str]
    are_disjoint: Callable[[tuple[Atom, ...], tuple[Atom, ...]], bool]
    _known: dict[tuple, Alternatives | None] = field(default_factory=dict)

    def read(self, part: Part) -> Alternatives:
        """Returns the alternatives of a schema, or of its opposite.

        Raises Refused for what is no schema, cannot be followed, or contains itself without a value around it.
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

    def all_of(self, parts: Iterable[Alternatives], place: Place) -> Alternatives:
        """Returns the alternatives that consist of one of each part."""
        joined = ALWAYS
        for alternatives in parts:
            is_product = len(joined) > 1 and len(alternatives) > 1
            joined = [(*a, *b) for a in joined for b in alternatives if types_of((*a, *b))]
            if is_product and len(joined) > FEW_ALTERNATIVES:
                joined = [atoms for atoms in joined if not self.are_disjoint(atoms, ())]
            if is_product and len(joined) > MOST_ALTERNATIVES:
                raise Refused(f"more than {MOST_ALTERNATIVES} alternatives cannot be followed", place and place.path)
        return joined

    def _read(self, schema: Any, place: Place, is_negated: bool) -> Alternatives:
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
        if is_negated:  # a schema that fails evaluates nothing
            return [tuple(map(_without_evaluation, atoms)) for atoms in itertools.chain(*parts)]
        alternatives = self.all_of(parts, place)
        for name in late:
            alternatives = [
                (*atoms, *unevaluated(name, atoms, Part(schema[name], place.inside(name)))) for atoms in alternatives
            ]
        return alternatives

    def _read_keyword(self, name: str, schema: dict[str, Any], place: Place, is_negated: bool) -> Alternatives:
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

    def _any_of(self, value: list, schema: dict, place: Place, is_negated: bool) -> Alternatives:
        found = [self.read(Part(part, place.inside("anyOf", i), is_negated)) for i, part in enumerate(value)]
        return self.all_of(found, place) if is_negated else [*itertools.chain(*found)]

    def _all_of(self, value: list, schema: dict, place: Place, is_negated: bool) -> Alternatives:
        found = [self.read(Part(part, place.inside("allOf", i), is_negated)) for i, part in enumerate(value)]
        return [*itertools.chain(*found)] if is_negated else self.all_of(found, place)

    def _one_of(self, value: list, schema: dict, place: Place, is_negated: bool) -> Alternatives:
        parts = [Part(part, place.inside("oneOf", i)) for i, part in enumerate(value)]
        holds = [self.read(part) for part in parts]
        if is_negated:
            none = self.all_of([self.read(part.opposite()) for part in parts], place)
            return none + [*itertools.chain(*(self.all_of(pair, place) for pair in itertools.combinations(holds, 2)))]
        found = []
        for i, alternatives in enumerate(holds):
            for atoms in alternatives:
                others = [
                    self.read(parts[j].opposite())
                    for j, other in enumerate(holds)
                    if j != i and not all(self.are_disjoint(atoms, b) for b in other)
                ]
                found += self.all_of([[atoms], *others], place)
        return found

    def _not(self, value: Any, schema: dict, place: Place, is_negated: bool) -> Alternatives:
        return self.read(Part(value, place.inside("not"), not is_negated))

    def _if(self, value: Any, schema: dict, place: Place, is_negated: bool) -> Alternatives:
        condition = Part(value, place.inside("if"))
        alternatives = []
        for name, holds in ("then", condition), ("else", condition.opposite()):
            more = self.read(Part(schema.get(name, True), place.inside(name), is_negated))
            if more:  # a condition whose opposite is not needed may have none
                alternatives += self.all_of([self.read(holds), more], place)
        return alternatives

    def _dependent(self, value: dict, schema: dict, place: Place, is_negated: bool) -> Alternatives:
        keyword = next(name for name in DEPENDENT if schema.get(name) is value)
        if keyword == "dependencies" and is_negated:  # of older drafts; by the present one, it never fails
            raise Refused("dependencies cannot be followed where a schema must not hold")
        parts = []
        for name, needed in value.items():
            missing = [only(EVERY_TYPE - {"object"}), only("object", Required(name, True))]
            if isinstance(needed, list):
                more = required(needed, schema, place, is_negated)
            else:
                more = self.read(Part(needed, place.inside(keyword, name), is_negated))
            then = self.all_of([[only("object", Required(name))], more], place)
            parts.append(then if is_negated else missing + then)
        return [*itertools.chain(*parts)] if is_negated else self.all_of(parts, place)

    def _ref(self, value: str, schema: dict, place: Place, is_negated: bool) -> Alternatives:
        if self.dynamic_anchors[value.partition("#")[2]] > 1 and schema.get("$ref") is value:
            raise Refused(f"$ref {value!r} to one of several $dynamicAnchor cannot be followed")
        try:
            target = place.resolver.lookup(value)
        except Unresolvable:
            raise Refused(f"reference {value!r} names nothing in this schema", place.path) from None
        return self.read(Part(target.contents, Place(target.resolver, value, is_resolved=True), is_negated))


def _without_evaluation(one: Atom) -> Atom:
    return replace(one, evaluates=False) if isinstance(one, Values | Items) and one.evaluates else one


DEPENDENT = "dependentSchemas", "dependentRequired", "dependencies"
APPLICATORS = {
    "anyOf": Reader._any_of, "allOf": Reader._all_of, "oneOf": Reader._one_of, "not": Reader._not, "if": Reader._if,
    **dict.fromkeys(DEPENDENT, Reader._dependent), "$ref": Reader._ref, "$dynamicRef": Reader._ref,
}  # fmt: skip
