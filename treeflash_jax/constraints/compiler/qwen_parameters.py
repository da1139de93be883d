"""Texts of a function's arguments as XML-like elements, the form of Qwen3-Coder's chat template."""

from collections.abc import Iterable
from typing import Any

from treeflash_jax.constraints.compiler.characters import free_text
from treeflash_jax.constraints.compiler.json_texts import unquoted
from treeflash_jax.constraints.compiler.refusals import Refused
from treeflash_jax.constraints.compiler.schema_reader import ANNOTATIONS
from treeflash_jax.constraints.compiler.terms import EMPTY, Term, concat, intersect, is_nothing, literal, union
from treeflash_jax.constraints.compiler.values import schema_texts
from treeflash_jax.formats.string_schemas import allows_strings

FOLLOWED = {"type", "properties", "required", "additionalProperties", *ANNOTATIONS}
MARKS = "<parameter", "</parameter", "</tool_call>"  # calls are parsed by these marks, so no value may contain them


def parameter_texts(schema: dict[str, Any], depth: int, excluded: Iterable[str]) -> Term:
    """Returns the elements of a function's arguments, in the order of `properties`. Only `required` ones must be there.

    If `allows_strings` holds for the schema of a value, the value is plain text without quotes. Otherwise it is JSON text.

    Args:
      schema: JSON schema of the arguments, an object.
      depth: as in `schema_texts`.
      excluded: further texts that no value may contain.

    Raises Refused for a name that an element cannot have, for keywords of objects other than FOLLOWED, and for a value that
    would be read as text though none of its values is a string.
    """
    unknown = schema.keys() - FOLLOWED
    if unknown:
        raise Refused(f"keyword {min(unknown)!r} cannot be followed in arguments")
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    if schema.get("type", "object") != "object" or not isinstance(properties, dict) or not isinstance(required, list):
        raise Refused("arguments are no object")
    undefined = [name for name in required if name not in [*properties]]  # of any type
    if undefined:
        raise Refused(f"required {undefined[0]!r} is none of the properties")
    plain_value = free_text((*MARKS, *excluded))
    elements = EMPTY
    cache: dict[str, bool] = {}
    for name in reversed(properties):
        if not name or set(name) & set("<>\n"):
            raise Refused(f"no element has the name {name!r}")
        value = schema_texts(schema, depth - 1, "properties", name)
        if allows_strings(properties[name], schema, cache):
            text = unquoted(value)
            if is_nothing(text) and not is_nothing(value):
                raise Refused("it allows no string: add a type without 'string'", f"#/properties/{name}")
            value = text
        value = intersect(value, plain_value)
        element = concat(literal(f"<parameter={name}>\n".encode()), value, literal(b"\n</parameter>\n"))
        elements = concat(element, elements) if name in required else union(concat(element, elements), elements)
    return elements
