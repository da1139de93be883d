"""Decides which values of <parameter=NAME> are plain text: for the constraint that writes them, and for their reader.

The process of the constraint compiler imports this file, which therefore imports nothing of the package.
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote


def allows_strings(schema: Any, document: Any, known: dict[str, bool]) -> bool:
    """Returns whether the types, listed values, references and alternatives of a JSON schema allow a string.

    Other keywords are not read. What is not a schema allows everything.

    Args:
      document: schema in which references are looked up.
      known: results of the document's references so far. Adds to it.
    """
    if not isinstance(schema, Mapping):
        return schema is not False
    kinds, reference = schema.get("type", "string"), schema.get("$ref")
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    holds = [kinds == "string" or (isinstance(kinds, list) and "string" in kinds)]
    if isinstance(listed, list):
        holds.append(any(isinstance(value, str) for value in listed))
    for name, join in ("allOf", all), ("anyOf", any), ("oneOf", any):
        if isinstance(schema.get(name), list):
            holds.append(join([allows_strings(part, document, known) for part in schema[name]]))
    if isinstance(reference, str):
        if reference not in known:
            known[reference] = True  # until it is read, for schemas that contain themselves
            known[reference] = allows_strings(_look_up(reference, document), document, known)
        holds.append(known[reference])
    return all(holds)


def _look_up(reference: str, document: Any) -> Any:
    """Returns the schema at a reference such as #/$defs/name; None for other references."""
    start, *keys = reference.split("/")
    schema = document if start == "#" else None
    for key in keys:
        key = unquote(key).replace("~1", "/").replace("~0", "~")
        schema = schema.get(key) if isinstance(schema, Mapping) else None
    return schema
