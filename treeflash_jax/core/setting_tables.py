"""Settings in tables, such as a TOML file's: dotted names, help, and instances from nested dicts.

A field that is a dataclass is a table; a name inside it is written with a dot.
"""

import dataclasses
import re
import textwrap
from collections.abc import Collection, Iterator
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar, get_args

from treeflash_jax.core.checks import UnknownSetting, hint
from treeflash_jax.core.error_text import clipped, quoted
from treeflash_jax.core.settings import coerce_field, default_text, field_choices, kinds

T = TypeVar("T")


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


def describe(cls: type, chosen: Collection[str] | None = None) -> str:
    """Returns name, help, choices and default of all settings, or of the chosen ones."""
    lines = []
    for name, kind, field in leaves(cls):
        if chosen is not None and name not in chosen:
            continue
        default = default_text(field)
        notes = [f"one of {', '.join(words)}"] if (words := field_choices(field, kind)) else []
        if _is_required(field):
            notes.append("required")
        elif default:
            notes.append(f"default: {default}")
        text = f"{name}: {field.metadata.get('help', '')}" + (f" ({'; '.join(notes)})." if notes else ".")
        lines += textwrap.wrap(text, 76, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(lines)


def _is_required(field: Field) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


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
        key = prefix + name
        field = cls.__dataclass_fields__.get(name)
        kind = kinds(cls).get(name)
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
