"""Structural tags as sets of byte strings: text, then a schema, then text, in the JSON format of xgrammar.

If constant text spells an added token of the vocabulary, such as <tool_call>, it means that token. The token is written as
a marker: two bytes that never occur in UTF-8. Free text, patterns and JSON texts have no markers. Free text may spell such
a token unless it excludes the text.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from treeflash_jax.constraints.compiler.characters import NO_UTF8, free_text, plain
from treeflash_jax.constraints.compiler.patterns import full_match
from treeflash_jax.constraints.compiler.refusals import Refused
from treeflash_jax.constraints.compiler.terms import Term, concat, literal, repeat, union

FLAGS = {"at_least_one": bool, "stop_after_first": bool}
KEYS: dict[str, dict[str, Any]] = {  # keys of each format with the types of their values; a list has the type of its items
    "const_string": {"value": str},
    "json_schema": {"json_schema": dict | bool, "style": str},
    "qwen_xml_parameter": {"json_schema": dict},
    "regex": {"pattern": str},
    "any_text": {"excludes": [str]},
    "sequence": {"elements": [dict]},
    "or": {"elements": [dict]},
    "optional": {"content": dict},
    "tag": {"begin": str, "content": dict, "end": str},
    "triggered_tags": {"triggers": [str], "tags": [dict], **FLAGS},
    "tags_with_separator": {"tags": [dict], "separator": str, **FLAGS},
}
DEFAULTS = {"style": "json", "excludes": [], **dict.fromkeys(FLAGS, False)}


def marker(index: int) -> bytes:
    """Returns the bytes that represent a token of a constraint."""
    return bytes([NO_UTF8, index])


def tag_texts(tag: dict[str, Any], depth: int, tokens: Iterable[str]) -> Term:
    """Returns the texts of a structural tag: a format, or {"type": "structural_tag", "format": a format}.

    Args:
      depth: as in `schema_texts`.
      tokens: texts of added tokens; a token's index is its number for `marker`.

    Raises Refused, with the place, for anything that is not a format or cannot be followed.
    """
    markers = {text: marker(index) for index, text in enumerate(tokens)}
    if isinstance(tag, dict) and tag.get("type") == "structural_tag":
        return _Formats(depth, markers).read(tag.get("format"), "format.")
    return _Formats(depth, markers).read(tag, "")


@dataclass(frozen=True)
class _Formats:
    """Reads nested formats. `place` is the place of a format, and `ends` are the ends of the tags around it."""

    depth: int
    markers: Mapping[str, bytes]

    def read(self, part: Any, place: str, ends: tuple[str, ...] = ()) -> Term:
        values = _values(part, place)
        match part["type"]:
            case "const_string":
                return self._constant(values["value"])
            case "json_schema":
                return self._read_schema(values["json_schema"], values["style"], place, ends)
            case "qwen_xml_parameter":  # older name
                return self._read_schema(values["json_schema"], "qwen_xml", place, ends)
            case "regex":
                return _placed(f"{place}pattern", lambda: full_match(values["pattern"], plain))
            case "any_text":
                return free_text((*values["excludes"], *ends))
            case "sequence":
                return concat(*self._read_all(values["elements"], f"{place}elements.", ends))
            case "or":
                return union(*self._read_all(values["elements"], f"{place}elements.", ends))
            case "optional":
                return repeat(self.read(values["content"], f"{place}content.", ends), 0, 1)
            case "tag":
                inner_ends = (*ends, values["end"]) if values["end"] else ends
                content = self.read(values["content"], f"{place}content.", inner_ends)
                return concat(self._constant(values["begin"]), content, self._constant(values["end"]))
        return self._read_tags(values, place, ends)

    def _constant(self, text: str) -> Term:
        longest_first = sorted(self.markers, key=len, reverse=True)
        pieces = re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if longest_first else [text]
        return literal(b"".join(self.markers.get(piece) or piece.encode() for piece in pieces))

    def _read_all(self, parts: list[dict], place: str, ends: tuple[str, ...]) -> list[Term]:
        return [self.read(part, f"{place}{i}.", ends) for i, part in enumerate(parts)]

    def _read_schema(self, schema: dict[str, Any] | bool, style: str, place: str, ends: tuple[str, ...]) -> Term:
        # Imports a package that the other formats do not need.
        from treeflash_jax.constraints.compiler.qwen_parameters import parameter_texts
        from treeflash_jax.constraints.compiler.values import schema_texts

        if style == "json":
            return _placed(f"{place}json_schema", lambda: schema_texts(schema, self.depth))
        if style == "qwen_xml" and isinstance(schema, dict):
            return _placed(f"{place}json_schema", lambda: parameter_texts(schema, self.depth, ends))
        raise Refused(f"{place}style {style!r} is unknown, expected 'json', or 'qwen_xml' with an object")

    def _read_tags(self, values: dict[str, Any], place: str, ends: tuple[str, ...]) -> Term:
        """Returns tags in free text that contains no trigger, or tags with separators between them."""
        tags = [{"type": "tag", **tag} for tag in values["tags"]]
        for i, tag in enumerate(tags):
            if tag["type"] != "tag":
                raise Refused(f"{place}tags.{i}.type {tag['type']!r} is not 'tag'")
        any_tag = union(*self._read_all(tags, f"{place}tags.", ends))
        is_needed, is_single = values["at_least_one"], values["stop_after_first"]
        if "separator" in values:
            more = repeat(concat(self._constant(values["separator"]), any_tag), 0, 0 if is_single else None)
            return repeat(concat(any_tag, more), int(is_needed), 1)
        for i, tag in enumerate(tags):
            if not tag["begin"].startswith(tuple(values["triggers"])):
                raise Refused(f"{place}tags.{i}.begin {tag['begin']!r} begins with none of the triggers")
        free = free_text((*values["triggers"], *ends))
        if is_single:
            return any_tag if is_needed else concat(free, repeat(any_tag, 0, 1))
        more = concat(repeat(concat(free, any_tag)), free)
        return concat(any_tag, more) if is_needed else more


def _values(part: Any, place: str) -> dict[str, Any]:
    """Returns the values of a format, with defaults. Raises Refused for anything but the keys of its type."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in KEYS:
        raise Refused(f"{place}type {kind!r} is unknown, expected one of {', '.join(KEYS)}")
    keys = KEYS[kind]
    for name in part.keys() - keys - {"type"}:
        raise Refused(f"{place}{name} cannot be followed in {kind!r}, which has {', '.join(keys)}")
    values = {name: part.get(name, DEFAULTS.get(name)) for name in keys}
    for name, expected in keys.items():
        if values[name] is None:
            raise Refused(f"{place}{name} is missing in {kind!r}")
        if not _has_type(values[name], expected):
            raise Refused(f"{place}{name} {values[name]!r} is of another type than {kind!r} has")
    return values


def _has_type(value: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return isinstance(value, list) and all(isinstance(item, expected[0]) for item in value)
    return isinstance(value, expected)


def _placed(place: str, write: Callable[[], Term]) -> Term:
    """Returns the result of `write`, and adds the place to its errors."""
    try:
        return write()
    except Refused as error:
        raise Refused(f"{place}: {error}") from None
