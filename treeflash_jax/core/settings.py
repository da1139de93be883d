"""Settings: frozen dataclasses with fields declared by `setting`.

    @dataclass(frozen=True, kw_only=True)
    class Sizes:
        nodes: int | None = setting(None, "tree nodes verified per round", least=1, unset="the drafter's", unit="nodes")

`validate` checks an instance. Command-line options are made from the fields (setting_options.py), and so are instances from
nested dicts, such as a TOML file (setting_tables.py).
"""

import dataclasses
import functools
from collections.abc import Callable, Collection
from dataclasses import MISSING, Field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from treeflash_jax.core.checks import INT32, coerce

kinds = functools.cache(get_type_hints)  # types of a dataclass's fields, by name


def setting(
    default: Any = MISSING,
    help: str = "",
    *,
    unit: str = "",
    unset: str = "",
    basic: bool = False,
    section: str = "",
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
      section: section of help that lists the field.
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
    shown = {"help": help, "unit": unit, "unset": unset, "basic": basic, "section": section, "dtype": dtype}
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


def field_names(cls: type, *sections: str, basic: bool | None = None) -> list[str]:
    """Returns the names of a dataclass's fields: only those in `sections`, if any, and only basic or only advanced ones."""
    chosen = [field for field in fields(cls) if not sections or field.metadata["section"] in sections]
    return [field.name for field in chosen if basic in (None, field.metadata["basic"])]


def default_text(field: Field) -> str:
    """Returns the default of a field as text: `unset` for None and (), "" for False and an empty text."""
    if field.default in (None, ()):
        return field.metadata.get("unset", "")
    return "" if field.default in ("", MISSING) or field.default is False else f"{field.default}"


def field_choices(field: Field, kind: Any) -> list[str]:
    """Returns the texts that a field accepts: its choices, or the values of its Literal type."""
    if choices := field.metadata.get("checks", {}).get("choices"):
        return list(choices())
    return [word for part in (kind, *get_args(kind)) if get_origin(part) is Literal for word in get_args(part)]
