"""Conversion of values to the types that settings and files have.

They are bool, int, float, str, None, classes, and Any, Literal, Callable, unions, lists, tuples and dictionaries of them.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
SURROGATES = re.compile("[\ud800-\udfff]")  # halves of characters, such as JSON's \ud800, which UTF-8 cannot encode


class Mismatch(Exception):
    """Raised for a part of a value that has not the expected type; `depth` counts the lists around the part."""

    def __init__(self, part: Any, expected: str, depth: int = 0):
        self.part, self.expected, self.depth = part, expected, depth


def convert(kind: Any, value: Any, from_text: bool) -> Any:
    """Returns a value converted to a type or type hint. Raises Mismatch if that is not possible."""
    if kind is Any:
        return value
    if kind in SCALARS:
        return SCALARS[kind](value if type(value) in SCALARS else _without_arrays(value), from_text)
    value = _without_arrays(value)
    origin = get_origin(kind)
    parts = get_args(kind)
    if origin in (Union, UnionType):
        return _convert_first(parts, value, from_text)
    if origin in (Mapping, dict):
        _require(isinstance(value, Mapping), value, "a dictionary")
        names = _convert_all(parts[:1] * len(value), value.keys(), from_text)
        return dict(zip(names, _convert_all(parts[1:] * len(value), value.values(), from_text), strict=True))
    if origin in (Sequence, list, tuple):
        _require(isinstance(value, Sequence) and not isinstance(value, str | bytes), value, "a list")
        is_fixed = origin is tuple and parts[-1] is not Ellipsis
        _require(not is_fixed or len(value) == len(parts), value, f"a list of {len(parts)}")
        items = _convert_all(parts if is_fixed else parts[:1] * len(value), value, from_text)
        return items if origin is list else tuple(items)
    if origin is Literal:
        _require(value in parts, value, " or ".join(map(repr, parts)))
    elif origin is Callable:
        _require(callable(value), value, "a function")
    else:
        _require(isinstance(value, kind), value, f"a {kind.__name__}")
    return value


def _require(is_met: bool, value: Any, expected: str) -> None:
    if not is_met:
        raise Mismatch(value, expected)


def _convert_first(kinds: Sequence[Any], value: Any, from_text: bool) -> Any:
    """Returns a value converted to the first of several types that fits. Texts are read as numbers only if no type fits."""
    mismatches = []
    for is_read in sorted({False, from_text}):
        for kind in kinds:
            try:
                return convert(kind, value, is_read)
            except Mismatch as mismatch:
                mismatches.append(mismatch)
    depth = max(mismatch.depth for mismatch in mismatches)  # reports a list's wrong item instead of the list
    deepest = [mismatch for mismatch in mismatches if mismatch.depth == depth and mismatch.expected]
    raise Mismatch(deepest[0].part, " or ".join(dict.fromkeys(mismatch.expected for mismatch in deepest)), depth)


def _convert_all(kinds: Sequence[Any], values: Iterable[Any], from_text: bool) -> list[Any]:
    """Returns the items of a list or dictionary, each converted to the type at its index in `kinds`."""
    try:
        return [convert(kind, value, from_text) for kind, value in zip(kinds, values, strict=True)]
    except Mismatch as mismatch:
        mismatch.depth += 1
        raise


def _as_bool(value: Any, from_text: bool) -> bool:
    truth = TRUTHS.get(str(value).lower()) if from_text else value
    _require(isinstance(truth, bool), value, "true or false")
    return truth


def _as_int(value: Any, from_text: bool) -> int:
    if type(value) is int:
        return value
    number = _as_number(int, value, int | float | str if from_text else int, "an integer")
    _require(isinstance(value, str) or number == value, value, "an integer")
    return number


def _as_float(value: Any, from_text: bool) -> float:
    number = _as_number(float, value, int | float | str if from_text else int | float, "a number")
    _require(math.isfinite(number), value, "a finite number")
    return number


def _as_number(kind: type, value: Any, accepted: Any, expected: str) -> Any:
    if isinstance(value, accepted) and not isinstance(value, bool):
        try:
            return kind(value)
        except (ValueError, OverflowError):
            raise Mismatch(value, expected) from None
    raise Mismatch(value, expected)


def _as_text(value: Any, from_text: bool) -> str:
    if from_text and isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    _require(isinstance(value, str), value, "a text")
    _require(value != "", value, "at least 1 character")
    _require(value.isascii() or not SURROGATES.search(value), value, "a text of whole characters")
    return value


def _as_none(value: Any, from_text: bool) -> None:
    _require(value is None, value, "")  # "": messages about a union name its other types only


SCALARS = {bool: _as_bool, int: _as_int, float: _as_float, str: _as_text, NoneType: _as_none}


def _without_arrays(value: Any) -> Any:
    """Converts arrays and scalars of NumPy and JAX to lists and numbers."""
    is_array = hasattr(value, "dtype") and hasattr(value, "tolist") and not isinstance(value, type)
    return value.tolist() if is_array else value
