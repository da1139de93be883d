"""Checks of values that users give: settings by their declaration, JSON files, and quoting in one line.

A setting is declared once, by the type of its dataclass field and the limits given to `bounded`. pydantic checks both; it
is imported at the first check, since its import takes a tenth of a second.
"""

from __future__ import annotations

import functools
import json
import math
import operator
import os
import re
import reprlib
import types
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, field, fields, replace
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Interval

from treeflash_jax.core import files
from treeflash_jax.core.suggest import suggestion

T = TypeVar("T")

QUOTED = 60  # characters of a value in a message
LONGEST_PATH = 120  # characters of a path in a message
LINE = 300  # characters of a message that holds another library's words
INT32 = 2**31 - 1
LIMITS = {"least": "ge", "most": "le", "above": "gt", "below": "lt"}  # our names of pydantic's constraints
CONFIG = {"allow_inf_nan": False, "str_min_length": 1, "arbitrary_types_allowed": True}  # pydantic's; texts are not empty
# Types for items of lists, which limits given to `bounded` do not reach in settings of training.
AtLeast0, AtLeast1 = Annotated[int, Interval(ge=0, le=2**53)], Annotated[int, Interval(ge=1, le=2**53)]
NonNegative, Positive = Annotated[float, Ge(0)], Annotated[float, Gt(0)]
Probability = Annotated[float, Interval(gt=0, le=1)]

WORDS = {  # of pydantic's messages, by ours
    r"\w+ should (be|have) |Unable to parse \w+ \w+ as |, (unable|exceeded)[^,]*?(?= or |$)": "",
    r"an instance of Sequence|a valid (tuple|list)|'\w+' instances are not allowed as a Sequence value": "a list",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "above",
    "less than": "below",
}

_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxother, _short.maxlong = 3, QUOTED, QUOTED, QUOTED
_short.maxlist = _short.maxtuple = _short.maxset = _short.maxdict = 8


def quoted(value: Any, size: int = QUOTED) -> str:
    """Returns a value as messages show it: one line of at most `size` characters, whatever the value is."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**size:
        return f"a number of about {int(value.bit_length() * math.log10(2)):,} digits"
    try:
        text = _short.repr(value)
    except Exception:  # a value's own repr may fail in any way
        text = type(value).__name__
    return clipped(text.encode("utf-8", "backslashreplace").decode(), size)


def clipped(text: object, size: int = LINE) -> str:
    """Returns any text, such as another library's error, as one line of at most `size` characters."""
    line = " ".join(str(text).split())
    return line if len(line) <= size else line[: size - 4] + " ..."


def bounded(
    default: Any = MISSING,
    help: str = "",
    *,
    unit: str = "",
    unset: str = "",
    kind: str = "",
    basic: bool = False,
    choices: Callable[[], Iterable[str]] | None = None,
    **limits: Any,
) -> Any:
    """Returns a dataclass field whose value is checked and described: `nodes: int = bounded(16, "tree nodes", least=1)`.

    Args:
      default: value of the field if none is given; without a default, the field is required.
      help: description for `help`, command lines and tables of options.
      unit: what a number counts, or the kind of a text.
      unset: meaning of the default None.
      kind: what the setting changes: "answer", "speed" or "program".
      basic: whether help and tables list it first, before the advanced ones.
      choices: returns the accepted texts; called at every check, since registries grow.
      **limits: `least`, `most`, `above` and `below` of a number, which is at most INT32 unless `most` says otherwise; or
        other constraints of `pydantic.Field`.
    """
    described = {"help": help, "unit": unit, "unset": unset, "kind": kind, "basic": basic, "choices": choices}
    limits = {"most": INT32} | limits if limits.keys() & LIMITS.keys() else limits
    return field(default=default, metadata=described | {LIMITS.get(name, name): limit for name, limit in limits.items()})


def default_text(setting: Field) -> str:
    """Returns the default of a field in words; "" if there is nothing to say."""
    if setting.default is None:
        return setting.metadata.get("unset", "")
    return "" if setting.default in ((), "", MISSING) or setting.default is False else f"{setting.default}"


def basic_first(cls: type) -> list[Field]:
    """Returns the fields of a dataclass, those declared as basic before the others."""
    return sorted(fields(cls), key=lambda setting: not setting.metadata["basic"])


def checked(config: T) -> T:
    """Returns a dataclass whose fields have their types and limits; scalars of NumPy and JAX become Python's.

    Raises:
      ValueError: the first field that does not fit.
    """
    changed = [setting.name for setting in fields(config) if getattr(config, setting.name) is not setting.default]
    checks = field_checks(type(config))
    return replace(config, **{name: checks[name](getattr(config, name)) for name in changed})


@functools.cache
def field_checks(cls: type) -> dict[str, Callable[..., Any]]:
    """Returns, for every field of a dataclass, `fit` with its type and limits."""
    kinds, checks = get_type_hints(cls, include_extras=True), {}
    for setting in fields(cls):
        limits = {
            name: x for name, x in setting.metadata.items() if name in ("ge", "le", "gt", "lt", "min_length", "choices")
        }
        checks[setting.name] = functools.partial(fit, kinds[setting.name], name=setting.name, **limits)
    return checks


def fit(
    kind: Any,
    value: Any,
    name: str,
    where: str = "",
    *,
    says: str = "",
    from_text: bool = False,
    choices: Callable[[], Iterable[str]] | None = None,
    **limits: Any,
) -> Any:
    """Returns a value as `kind`, a type or a type hint such as `float | Sequence[float]`; lists become tuples.

    Args:
      name: name of the value in messages.
      where: file that the value is from, if any.
      says: the expectation in words, in place of pydantic's.
      from_text: whether texts may stand for numbers, as on command lines.
      choices: returns the accepted texts.
      **limits: as of `bounded`, or of `pydantic.Field`.

    Raises:
      ValueError: the value is something else.
    """
    place = f"{where}: " if where else ""
    try:
        limits = tuple((LIMITS.get(limit, limit), x) for limit, x in limits.items())
        fitted = _adapter(kind, limits).validate_python(_without_arrays(value), strict=not from_text)
    except ValueError as error:
        value, expected = explain(error.errors(include_url=False))
        raise ValueError(f"{place}got {name} {quoted(value)}, expected {says or expected}") from None
    if choices is not None and fitted is not None and fitted not in choices():
        meant, known = suggestion(fitted, choices()), list(map(repr, choices()))
        expected = "one of " * (len(known) > 1) + ", ".join(known) + (f"; did you mean {meant}?" if meant else "")
        raise ValueError(f"{place}got {name} {quoted(fitted)}, expected {expected}")
    return tuple(fitted) if isinstance(fitted, list) and get_origin(kind) is not list else fitted


def _without_arrays(value: Any) -> Any:
    """Returns numbers and lists in place of ranges and of arrays and scalars of NumPy and JAX."""
    if isinstance(value, range):
        return list(value)
    if hasattr(value, "tolist") and hasattr(value, "dtype"):
        return value.tolist()
    return type(value)(map(_without_arrays, value)) if type(value) in (list, tuple) else value


@functools.lru_cache(1024)
def _adapter(kind: Any, limits: tuple[tuple[str, Any], ...]) -> Any:
    import pydantic

    numbers = pydantic.Field(**{name: limit for name, limit in limits if name != "min_length"})
    sizes = pydantic.Field(**{name: limit for name, limit in limits if name == "min_length"})
    return pydantic.TypeAdapter(Annotated[_limited(kind, numbers), sizes], config=CONFIG)


def _limited(kind: Any, limits: Any) -> Any:
    """Returns a type hint whose numbers have limits, also those inside lists and unions."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind in (int, float):
        return Annotated[kind, limits]
    if origin in (None, Literal, Annotated):
        return kind
    parts = tuple(part if part is ... else _limited(part, limits) for part in parts)
    return functools.reduce(operator.or_, parts) if origin in (Union, types.UnionType) else origin[parts]


def explain(errors: list[Any]) -> tuple[Any, str]:
    """Returns the value that `errors()` of a `pydantic.ValidationError` are about, and what was expected in its place."""
    depth = max(len(error["loc"]) for error in errors)  # of a list, its item says more than the list
    errors = [error for error in errors if len(error["loc"]) == depth]
    text = " or ".join(dict.fromkeys(error["msg"] for error in errors))
    for theirs, ours in WORDS.items():
        text = re.sub(theirs, ours, text)
    return errors[0]["input"], text


def whole(value: Any, name: str, least: int = 0, most: int = INT32) -> int:
    """Returns a whole number from `least` to `most` as Python's int. Raises ValueError if it is anything else."""
    return fit(int, value, name, least=least, most=most, says=f"{least} to {most}" if most < INT32 else "")


def parse_json(text: str | bytes) -> Any:
    """Returns a JSON value.

    Raises:
      ValueError: in a few words without a place, text that is not JSON, is nested too deeply, or has a number of thousands
        of digits.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except UnicodeDecodeError:
        raise ValueError("not valid JSON: not UTF-8") from None
    except RecursionError:
        raise ValueError("not valid JSON: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"not valid JSON: {clipped(error, QUOTED)}") from None


def read_json(path: str | os.PathLike) -> dict[str, Any]:
    """Returns the object of a JSON file.

    Raises:
      ValueError: a file that cannot be read or holds anything else.
    """
    place = files.regular(path)
    try:
        raw = parse_json(place.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{path} not found; expected a Hugging Face model folder") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); expected a JSON file") from None
    except ValueError as error:
        raise ValueError(f"{path} is {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: got a JSON {type(raw).__name__}, expected an object")
    return raw
