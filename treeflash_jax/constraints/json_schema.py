"""Checks that all of a JSON schema is followed. The rest is refused by name: outlines-core would drop it silently."""

import functools
import itertools
import json
import math
from collections.abc import Mapping
from typing import Any

from treeflash_jax.constraints.expressions import Unusable, compile_bytes
from treeflash_jax.core.checks import expect, quoted
from treeflash_jax.decoding.automaton import NOWHERE

# outlines-core reads a JSON schema by the first of these keywords, or else by its type, and drops silently what does not
# stand beside it here.
BESIDE = {
    "properties": "required additionalProperties", "anyOf": "", "oneOf": "", "prefixItems": "minItems maxItems items",
    "enum": "", "const": "", "$ref": "",
}  # fmt: skip
BESIDE_TYPE = {
    "string": "minLength maxLength pattern format", "array": "items minItems maxItems", "object": "additionalProperties",
    "number": "", "integer": "", "boolean": "", "null": "",
}  # fmt: skip
ANNOTATIONS = """type title description default examples deprecated readOnly writeOnly discriminator $schema $id $comment
    $defs definitions""".split()
FORMATS = "date", "date-time", "uuid"  # others of outlines-core match texts that are no JSON


def as_json(schema: Any) -> Any:
    """Returns a schema, or each of a list of them, as JSON text: of a dictionary, a pydantic model, or JSON text."""
    if isinstance(schema, list | tuple):
        return tuple(as_json(item) for item in schema)
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    return json.dumps(schema) if isinstance(schema, Mapping) else schema


def check_schema(schema: Any, root: Any, is_open: dict[str, bool]) -> None:
    """Raises ValueError for what would not be followed in a schema and in those inside it.

    Args:
      root: the schema that references are paths in.
      is_open: the references met so far; True while the schema that they name is being checked.
    """
    if isinstance(schema, bool) or schema is None:
        return
    first = next((name for name in BESIDE if name in schema), "type")
    kinds = schema.get("type")
    kinds = [kind for kind in BESIDE_TYPE if kind in (kinds if isinstance(kinds, list) else [kinds])]
    beside = [BESIDE[first]] if first in BESIDE else [BESIDE_TYPE[kind] for kind in kinds]
    known = {*ANNOTATIONS, first, *" ".join(beside).split()}
    for name in schema:
        expect(name in known, "keyword of a schema", name, f"one that outlines-core follows beside {first!r}")
    if first == "properties":
        for name in schema[first]:
            expect(json.dumps(name, ensure_ascii=False) == f'"{name}"', "property", name, "no quotes or backslashes")
        missing = {*schema.get("required", [])} - {*schema[first]}
        expect(not missing, "required", sorted(missing), "names of properties")
    elif first == "prefixItems":
        count, least, most = len(schema[first]), schema.get("minItems", 0), schema.get("maxItems", math.inf)
        expect(least <= count <= most, "minItems and maxItems", [least, most], f"those of {count} prefixItems")
    elif first == "type" and "string" in kinds:
        _check_text(schema)
    elif first == "$ref":
        place = schema[first]
        if is_open.get(place):
            raise ValueError(f"got a schema that contains itself ({quoted(place)}), which cannot be followed")
        if place not in is_open:
            is_open[place] = True
            named = functools.reduce(lambda part, key: part[key], filter(None, place.split("#")[-1].split("/")), root)
            check_schema(named, root, is_open)
            is_open[place] = False
    for part in _parts_of(schema):
        check_schema(part, root, is_open)


def _parts_of(schema: dict[str, Any]) -> list[Any]:
    """Returns the schemas inside a schema."""
    lists = [schema.get("properties", {}).values(), *(schema.get(name, []) for name in ("anyOf", "oneOf", "prefixItems"))]
    return [schema.get("items"), schema.get("additionalProperties"), *itertools.chain(*lists)]


def _check_text(schema: dict[str, Any]) -> None:
    """Raises ValueError for a text with keywords that would be dropped, or a pattern that can match what ends a text."""
    given = [name for name in ("minLength", "maxLength", "pattern", "format") if name in schema]
    expect(given in (["minLength", "maxLength"], given[:1]), "keywords of a text", given, "its lengths, pattern or format")
    if "format" in schema:
        expect(schema["format"] in FORMATS, "format of a text", schema["format"], f"one of {', '.join(FORMATS)}")
    if "pattern" in schema:
        pattern = schema["pattern"]
        body = pattern[1:-1] if pattern.startswith("^") and pattern.endswith("$") else pattern
        try:
            next_qy, _ = compile_bytes("pattern", body)
        except Unusable as error:
            raise ValueError(f"got pattern {quoted(pattern)} in a schema, {error}") from None
        is_safe = (next_qy[:, [*range(32), *b'"\\']] == NOWHERE).all()
        expect(is_safe, "pattern in a schema", pattern, "one that matches no quotes, backslashes or control characters")
