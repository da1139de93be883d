"""Command-line options for the fields of settings."""

import argparse
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from treeflash_jax.core.json_files import parse_json
from treeflash_jax.core.settings import coerce_field, default_text, field_choices, kinds


def add_options(
    parser: Any, cls: type, chosen: Collection[str] | None = None, *, several: Collection[str] = (), **defaults: Any
) -> None:
    """Adds an option for every field of a dataclass, with its type, limits, default, choices, unit and help.

    Args:
      chosen: names of the fields to add; None for all.
      several: names of fields that may have a list of values on the command line.
      **defaults: values that replace the fields' defaults. With argparse.SUPPRESS, the parsed result contains only the
        options that were given.
    """
    for field in fields(cls):
        if chosen is None or field.name in chosen:
            keywords = _option(cls, field, defaults.get(field.name, field.default))
            if field.name in several:
                keywords["nargs"] = "+"
            parser.add_argument("--" + field.name.replace("_", "-"), **keywords)


def _option(cls: type, field: Field, default: Any) -> dict[str, Any]:
    """Returns the arguments of `add_argument` for a field. The option of a field of type T | Sequence[T] takes a T."""
    kind = kinds(cls)[field.name]
    parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else [kind]
    lists = [Sequence[item] for part in parts for item in (part, part | None)]
    parts = [part for part in parts if part is not NoneType and part not in lists]
    is_usual = default is field.default or default is argparse.SUPPRESS
    usual = default_text(field) if is_usual else re.sub(r"[\[\],']", "", str(default))
    text = (field.metadata["help"] + (f" (default: {usual})" if usual else "")).replace("%", "%%")
    if parts == [bool]:
        return {"action": "store_true", "default": default, "help": text}
    keywords = {"help": text} | ({"required": True} if default is MISSING else {"default": default})
    words = field_choices(field, kind)
    if "choices" in field.metadata["checks"] or all(get_origin(part) is Literal for part in parts):
        spelled = field.metadata["checks"].get("spelled")
        return keywords | {"choices": words} | ({"type": spelled} if spelled else {})
    unit = field.metadata["unit"] or "number"
    keywords["metavar"] = "|".join([unit.upper() if unit.islower() else unit, *words])
    if parts == [Sequence[str]]:
        return keywords | {"action": "append", "default": default if default is argparse.SUPPRESS else list(default)}

    def read(text: str) -> Any:
        try:
            if get_origin(parts[0]) is Mapping:
                return coerce_field(cls, field.name, parse_json(text), from_text=True)
            value = text.replace(",", " ").split() if parts == [Sequence[int]] else text
            return coerce_field(cls, field.name, value, from_text=True)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return keywords | {"type": read}


def option_values(arguments: argparse.Namespace, cls: type) -> dict[str, Any]:
    """Returns the parsed values of the fields of a dataclass."""
    return {field.name: getattr(arguments, field.name) for field in fields(cls) if hasattr(arguments, field.name)}
