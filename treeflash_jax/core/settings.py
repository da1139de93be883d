"""Settings: frozen dataclasses with fields declared by `setting`, and their checks, help, options and dotted names.

    @dataclass(frozen=True, kw_only=True)
    class Sizes:
        nodes: int | None = setting(None, "tree nodes verified per round", least=1, unset="the drafter's", unit="nodes")

`validate` checks an instance, `describe` returns the help text, and `add_options` adds a command-line option for every
field. `build` makes an instance from nested dicts, such as a TOML file; a name inside a table is written with a dot.
"""

import argparse
import dataclasses
import functools
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from treeflash_jax.core.checks import INT32, UnknownSetting, coerce, hint
from treeflash_jax.core.error_text import clipped, quoted
from treeflash_jax.core.json_files import parse_json

T = TypeVar("T")
kinds = functools.cache(get_type_hints)  # types of a dataclass's fields, by name


def setting(
    default: Any = MISSING,
    help: str = "",
    *,
    unit: str = "",
    unset: str = "",
    basic: bool = False,
    group: str = "",
    dtype: type | None = None,
    choices: Callable[[], Collection[str]] | None = None,
    spelled: Callable[[Any], Any] | None = None,
    min_length: int | None = None,
    default_factory: Any = MISSING,
    **limits: float,
) -> Any:
    """Returns a dataclass field with help and checks, for example `nodes: int = setting(16, "tree nodes", least=1)`.

    Args:
      default: default value; a field with neither this nor a `default_factory` is required.
      help: description for `help` and command lines.
      unit: unit of a number, or kind of a text.
      unset: meaning of the default None or ().
      basic: whether the field is listed before the advanced ones.
      group: title of the section of help that lists the field.
      dtype: int or float, dtype of the array with the setting's values for a batch; None: there is no such array.
      choices: function that returns the accepted texts; called at every check, since registries grow.
      spelled: function that returns the usual form of a value with several forms; it runs before choices are compared.
      min_length: smallest length of a list; 0 accepts an empty text.
      **limits: `least`, `most` (INT32 by default), `above` and `below`: limits of a number, or of every number in a list.
    """
    checks: dict[str, Any] = {"most": INT32} | limits if limits else {}
    checks |= {"choices": choices} if choices else {}
    checks |= {"spelled": spelled} if spelled else {}
    checks |= {} if min_length is None else {"min_length": min_length}
    shown = {"help": help, "unit": unit, "unset": unset, "basic": basic, "group": group, "dtype": dtype}
    return dataclasses.field(default=default, default_factory=default_factory, metadata=shown | {"checks": checks})


def coerce_field(cls: type, name: str, value: Any, *, label: str = "", from_text: bool = False) -> Any:
    """Converts a value to the type of a field. Raises ValueError for another type or a value outside its limits."""
    checks = cls.__dataclass_fields__[name].metadata.get("checks", {})
    return coerce(kinds(cls)[name], value, label or name, from_text=from_text, **checks)


def validate(config: Any) -> None:
    """Checks a new instance; for `__post_init__`. Converts scalars and arrays of NumPy and JAX to numbers and tuples."""
    for field in fields(config):
        value = getattr(config, field.name)
        if value is not field.default:
            object.__setattr__(config, field.name, coerce_field(type(config), field.name, value))


def changed(config: Any) -> dict[str, Any]:
    """Returns the fields that differ from their defaults."""
    return {x.name: getattr(config, x.name) for x in fields(config) if getattr(config, x.name) != x.default}


def field_names(cls: type, *groups: str, basic: bool | None = None) -> list[str]:
    """Returns the names of a dataclass's fields: only those in `groups`, if any, and only basic or only advanced ones."""
    chosen = [field for field in fields(cls) if not groups or field.metadata["group"] in groups]
    return [field.name for field in chosen if basic in (None, field.metadata["basic"])]


def default_text(field: Field) -> str:
    """Returns the default of a field as text: `unset` for None and (), "" for False and an empty text."""
    if field.default in (None, ()):
        return field.metadata.get("unset", "")
    return "" if field.default in ("", MISSING) or field.default is False else f"{field.default}"


def describe(cls: type, chosen: Collection[str] | None = None) -> str:
    """Returns name, help, choices and default of all settings, or of the chosen ones."""
    lines = []
    for name, kind, field in leaves(cls):
        if chosen is not None and name not in chosen:
            continue
        default = default_text(field)
        notes = [f"one of {', '.join(words)}"] if (words := _choices(field, kind)) else []
        if _is_required(field):
            notes.append("required")
        elif default:
            notes.append(f"default: {default}")
        text = f"{name}: {field.metadata.get('help', '')}" + (f" ({'; '.join(notes)})." if notes else ".")
        lines += textwrap.wrap(text, 76, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(lines)


def _is_required(field: Field) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _choices(field: Field, kind: Any) -> list[str]:
    """Returns the texts that a field accepts: its choices, or the values of its Literal type."""
    if choices := field.metadata.get("checks", {}).get("choices"):
        return list(choices())
    return [word for part in (kind, *get_args(kind)) if get_origin(part) is Literal for word in get_args(part)]


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
    words = _choices(field, kind)
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


def leaves(cls: type, prefix: str = "") -> Iterator[tuple[str, Any, Field]]:
    """Yields dotted name, type and field of every setting. Tables come last; names of lists of tables end with "[]"."""
    tables = []
    for field in fields(cls):
        kind = kinds(cls)[field.name]
        table = _table(kind)
        if table is None:
            yield prefix + field.name, kind, field
        else:
            tables.append((table, f"{prefix}{field.name}{'.' if table is kind else '[].'}"))
    for table, name in tables:
        yield from leaves(table, name)


def _table(kind: Any) -> type | None:
    """Returns the dataclass of a field that is a table or a list of tables; None for other fields."""
    return next((part for part in (kind, *get_args(kind)) if dataclasses.is_dataclass(part)), None)


def setting_names(cls: type) -> list[str]:
    """Returns the dotted name of every setting. A name inside a list of tables has no item number."""
    return [name.replace("[]", "") for name, _, _ in leaves(cls)]


def build(cls: type[T], raw: dict[str, Any], where: str = "settings") -> T:
    """Builds settings from nested dicts. Raises UnknownSetting, and ValueError for a missing or wrong value."""
    try:
        return _build(cls, raw, "", setting_names(cls))
    except UnknownSetting as error:
        raise UnknownSetting(f"{where}: {error}") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _build(cls: type, raw: Any, prefix: str, known: list[str]) -> Any:
    """Builds the settings of a table; `known` are the dotted names of all settings, for hints."""
    if not isinstance(raw, dict):
        raise ValueError(f"got {prefix[:-1]} = {quoted(raw)}, expected a dictionary")
    values = {}
    for name, value in raw.items():
        key, field, kind = prefix + name, cls.__dataclass_fields__.get(name), kinds(cls).get(name)
        table = _table(kind)
        if field is None:
            tables = {other.rpartition(".")[0] for other in known}
            ending = hint(re.sub(r"\.\d+", "", key), [*known, *tables])
            ending = ending or f"; expected one of {clipped(', '.join(known), 160)}"
            raise UnknownSetting(f"got unknown setting {clipped(key, 60)}{ending}")
        if table is None:
            values[name] = coerce_field(cls, name, value, label=f"{key} =", from_text=True)
        elif table is kind:
            values[name] = _build(table, value, f"{key}.", known)
        elif isinstance(value, list) and len(value) >= field.metadata.get("checks", {}).get("min_length", 0):
            values[name] = tuple(_build(table, item, f"{key}.{i}.", known) for i, item in enumerate(value))
        else:
            raise ValueError(f"got {key} = {quoted(value)}, expected a list of tables with at least one")
    for field in fields(cls):
        if _is_required(field) and field.name not in raw:
            raise ValueError(f"got no {prefix}{field.name}, expected a value")
    return cls(**values)


def dotted(raw: dict[str, Any], prefix: str = "", *, into_lists: bool = False) -> dict[str, Any]:
    """Flattens nested dicts to one with dotted names. With `into_lists`, also flattens lists of dicts, by item number."""
    flat: dict[str, Any] = {}
    for key, value in raw.items():
        if into_lists and isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            value = {str(number): item for number, item in enumerate(value)}
        if isinstance(value, dict):
            flat |= dotted(value, f"{prefix}{key}.", into_lists=into_lists)
        else:
            flat[prefix + key] = value
    return flat
