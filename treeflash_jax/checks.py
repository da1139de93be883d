"""What every value that a user gives passes through: typed checks of settings, one reader of JSON, one way to quote.

A setting is checked by the type of its dataclass field and by the bounds declared with it (`bounded`), so a setting that is
added later needs no check of its own. Messages are one line and quote little of what was got.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import operator
import os
import re
import reprlib
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from treeflash_jax import files
from treeflash_jax.suggest import suggestion

T = TypeVar("T")

QUOTED = 60  # characters of a value in a message
LONGEST_PATH = 120  # characters of a path in a message
LINE = 300  # characters of a message that holds another library's words
INT32 = 2**31 - 1
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # half a character: no UTF-8 file, tokenizer or terminal takes it

_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxother, _short.maxlong = 3, QUOTED, QUOTED, QUOTED
_short.maxlist = _short.maxtuple = _short.maxset = _short.maxdict = 8


def quoted(value: Any, size: int = QUOTED) -> str:
    """A value as messages show it: one line of at most `size` characters, whatever the value is."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**size:
        return f"a number of about {int(value.bit_length() * math.log10(2)):,} digits"
    try:
        text = _short.repr(value)
    except Exception:  # a value's own repr may fail in any way
        text = type(value).__name__
    return clipped(text.encode("utf-8", "backslashreplace").decode(), size)


def clipped(text: object, size: int = LINE) -> str:
    """Any text, such as another library's error, as one line of at most `size` characters; its end is left out."""
    line = " ".join(str(text).split())
    return line if len(line) <= size else line[: size - 4] + " ..."


@dataclass(frozen=True)
class Bounds:
    """What a value must be besides its type; of every item where it is a list.

    Attributes:
      least, most: included.
      above, below: not included.
      nonempty: whether a text, or a list, must hold something; None: a text must, unless its field's default is empty.
      choices: gives the texts that there are, when a value is checked: registries grow.
      says: the expectation in words; None derives it.
    """

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    nonempty: bool | None = None
    choices: Callable[[], Sequence[str]] | None = None
    says: str | None = None

    def hold(self, value: Any) -> bool:
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def words(self) -> str:
        if self.least is not None and self.most is not None:
            return f"from {self.least:,} to {self.most:,}"
        named = (("at least", self.least), ("above", self.above), ("at most", self.most), ("below", self.below))
        text = " and ".join(f"{word} {value:,}" for word, value in named if value is not None)
        return f"of {text}" if text.startswith("at ") else text


def bounded(
    default: Any = MISSING,
    help: str = "",
    *,
    unit: str = "",
    unset: str = "",
    kind: str = "",
    basic: bool = False,
    **bounds: Any,
) -> Any:
    """A dataclass field whose value is checked and described: `nodes: int = bounded(16, "tree nodes", least=1)`.

    Args:
      default: of the field; without one it is required.
      help: what it is, in a few words: for `help`, command lines and tables of options.
      unit: what it counts, or what kind of text it is.
      unset: what a default of None means.
      kind: what it changes: "answer", "speed" or "program".
      basic: whether help and tables list it first, before the advanced ones.
      **bounds: of Bounds.
    """
    about = {"help": help, "unit": unit, "unset": unset, "kind": kind, "basic": basic}
    return field(default=default, metadata={"bounds": Bounds(**bounds)} | about)


def default_of(one: Field) -> str:
    """The default of a field in words; "" where there is nothing to say."""
    if one.default is None:
        return one.metadata.get("unset", "")
    return "" if one.default in ((), "", MISSING) or one.default is False else f"{one.default}"


def basic_first(cls: type) -> list[Field]:
    """Returns the fields of a dataclass, those declared as basic before the others."""
    return sorted(fields(cls), key=lambda one: not one.metadata["basic"])


def documented(cls: type[T]) -> type[T]:
    """Adds the fields of a dataclass to its docstring, with the help they were declared with: the basic ones first."""
    lines, heading = [inspect.cleandoc(cls.__doc__ or "")], ""
    for one in basic_first(cls):
        title = "Attributes:" if one.metadata["basic"] else "Advanced attributes:"
        lines += [] if title == heading else ["", title]
        heading, default = title, default_of(one)
        text = f"{one.name}: {one.metadata['help']}" + (f" (default: {default})." if default else ".")
        lines += textwrap.wrap(text, 118, initial_indent="  ", subsequent_indent="    ")
    cls.__doc__ = "\n".join(lines)
    return cls


class _Misfit(Exception):
    """The value, or the item of a list, that is not what was expected."""

    def __init__(self, value: Any):
        self.value = value


def checked(config: T) -> T:
    """A dataclass with every field of its type and within its bounds; NumPy and JAX scalars become Python's.

    Raises:
      ValueError: the first field that does not fit.
    """
    values = {one.name: getattr(config, one.name) for one in fields(config)}
    fitted = fit_fields(type(config), values)
    changed = {name: value for name, value in fitted.items() if value is not values[name]}
    return replace(config, **changed) if changed else config


def fit_fields(cls: type, values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values of a dataclass's fields, each of its field's type and within its bounds.

    Args:
      cls: the dataclass. A text may be empty only where the field's default is, and a whole number has 32 bits where its
        field sets no other limit.
      values: by field; missing ones are not looked at.
      prefix: of names in messages.

    Raises:
      ValueError: the first value that does not fit.
    """
    fitted = dict(values)
    for name, kind, bounds, default in _fields(cls):
        if name in values and values[name] is not default:
            fitted[name] = fit(kind, values[name], prefix + name, bounds)
    return fitted


def fit(kind: Any, value: Any, what: str, bounds: Bounds = Bounds(), where: str = "") -> Any:
    """The value as `kind`, a type or a type hint such as `float | Sequence[float]`.

    Args:
      kind: of numbers, texts, truth values, literals, lists, mappings, dataclasses and unions of them.
      what: its name in messages.
      where: the file it is from, if any.

    Raises:
      ValueError: it is something else.
    """
    try:
        return _fit(kind, value, bounds)
    except _Misfit as misfit:
        place = f"{where}: " if where else ""
        meant = suggestion(str(misfit.value), bounds.choices()) if bounds.choices else None
        raise ValueError(
            f"{place}got {what} {quoted(misfit.value)}, expected {_expected(kind, bounds)}"
            + (f"; did you mean {meant}?" if meant else "")
        ) from None


def whole(value: Any, what: str, least: int = 0, most: int = INT32) -> int:
    """A whole number from `least` to `most`, as Python's int. Raises ValueError where it is anything else."""
    return fit(int, value, what, Bounds(least=least, most=most, says=f"{least} to {most}" if most < INT32 else None))


@functools.cache
def _fields(cls: type) -> tuple[tuple[str, Any, Bounds, Any], ...]:
    """Name, kind, bounds and default of every field."""
    kinds, found = get_type_hints(cls), []
    for one in fields(cls):
        bounds = one.metadata.get("bounds", Bounds())
        is_text = str in (kinds[one.name], *get_args(kinds[one.name]))
        if bounds.nonempty is None and is_text and one.default != "":
            bounds = replace(bounds, nonempty=True)
        if bounds.most is None and _holds_whole(kinds[one.name]):
            bounds = replace(bounds, most=INT32)
        found.append((one.name, kinds[one.name], bounds, one.default))
    return tuple(found)


def _holds_whole(kind: Any) -> bool:
    return kind is int or any(map(_holds_whole, get_args(kind)))


def _fit(kind: Any, value: Any, bounds: Bounds) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        return _fit_one_of(arguments, value, bounds)
    if origin is Literal:
        if isinstance(value, str | int) and any(value is one or value == one for one in arguments):
            return value
    elif origin is not None and issubclass(origin, Mapping):
        if isinstance(value, Mapping):
            return {_fit(arguments[0], key, bounds): _fit(arguments[1], item, bounds) for key, item in value.items()}
    elif origin is not None and issubclass(origin, Sequence):
        is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)
        if (is_list or getattr(value, "ndim", None) == 1) and (len(value) or not bounds.nonempty or arguments[0] is str):
            return (list if origin is list else tuple)(_fit(arguments[0], item, bounds) for item in value)
    elif kind in (int, float, bool, str):
        return _fit_scalar(kind, value, bounds)
    elif is_dataclass(kind) or isinstance(kind, type):
        if isinstance(value, kind):
            return value
    raise _Misfit(value)


def _fit_one_of(kinds: Sequence[Any], value: Any, bounds: Bounds) -> Any:
    if value is None and types.NoneType in kinds:
        return None
    item = value
    for kind in kinds:
        if kind is not types.NoneType:
            try:
                return _fit(kind, value, bounds)
            except _Misfit as misfit:  # of a list its item says more than the list
                item = item if misfit.value is value else misfit.value
    raise _Misfit(item)


def _fit_scalar(kind: type, value: Any, bounds: Bounds) -> Any:
    if kind is str:
        if isinstance(value, str) and (value or not bounds.nonempty) and not _LONE_SURROGATE.search(value):
            if bounds.choices is None or value in bounds.choices():
                return value
        raise _Misfit(value)
    if kind is bool:
        if isinstance(value, bool | np.bool_):
            return bool(value)
        raise _Misfit(value)
    is_array = hasattr(value, "dtype")
    if isinstance(value, bool | np.bool_) or (is_array and (np.ndim(value) or value.dtype == bool)):
        raise _Misfit(value)
    try:
        if kind is int:
            number = operator.index(value)
        elif isinstance(value, int | float) or is_array:
            number = float(value)
        else:
            raise _Misfit(value)
    except (TypeError, ValueError, OverflowError):
        raise _Misfit(value) from None
    if (kind is float and not math.isfinite(number)) or not bounds.hold(number):
        raise _Misfit(value)
    return number


def _expected(kind: Any, bounds: Bounds) -> str:
    """In words, such as "a whole number of at least 1, or None"."""
    return bounds.says or f"{_name(kind, bounds)} {bounds.words()}".rstrip()


def _name(kind: Any, bounds: Bounds) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(_name(one, bounds) for one in sorted(arguments, key=lambda one: one is types.NoneType))
    if origin is Literal:
        return ", ".join(map(repr, arguments)) if len(arguments) == 1 else f"one of {', '.join(map(repr, arguments))}"
    if origin is not None and issubclass(origin, Mapping):
        return "a table"
    if origin is not None:
        return f"a list ({_name(arguments[0], bounds)})"
    text = "a text that is not empty" if bounds.nonempty else "a text"
    text = f"one of {', '.join(map(repr, bounds.choices()))}" if bounds.choices else text
    named = {int: "a whole number", float: "a number", bool: "true or false", str: text, types.NoneType: "None"}
    return named.get(kind) or getattr(kind, "__name__", str(kind))


def parse_json(text: str | bytes) -> Any:
    """A JSON value.

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
    """The object of a JSON file.

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
