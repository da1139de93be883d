"""Limits on chat templates: they come with models, are programs, and may run for ever or write without end.

Templates are Python functions. Tracing sees their lines, and the texts that they and jinja2's helpers hand on; what a
single operation makes is looked at before it is made, since nothing can stop it then.
"""

from __future__ import annotations

import functools
import math
import operator
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

SECONDS = 3.0  # of the processor
CHARACTERS = 2**26
ENTRIES = 2**18  # of a list
_WIDTH = re.compile(r"\d{8,}")  # in a format string


class TemplateLimit(BaseException):
    """A chat template ran for too long or wrote too much. No Exception: jinja2 goes on after some of those."""


@contextmanager
def limited() -> Iterator[None]:
    """Ends what runs in this thread when it has taken SECONDS or made CHARACTERS.

    Raises:
      ValueError: in these cases.
    """
    _guard_operators()
    soon, end, written = time.perf_counter() + SECONDS, time.thread_time() + SECONDS, 0
    weigh = _Scale()

    def trace(frame: Any, event: str, value: Any) -> Any:
        nonlocal written
        if time.perf_counter() > soon and time.thread_time() > end:  # the first clock is quick to read
            raise TemplateLimit(f"it ran for more than {SECONDS:g} s")
        is_template = frame.f_code.co_filename == "<template>"
        if event == "return" and isinstance(value, str | list | tuple):
            written += len(value)
        elif event == "line" and is_template:
            held = sum(len(kept) for kept in frame.f_locals.values() if isinstance(kept, str | list | tuple))
            _check_size(max(held, weigh.largest(frame.f_locals.values())))
        elif event == "call" and _makes_texts(frame.f_code) and frame.f_back is not None:
            if _is_jinja(frame.f_back.f_code.co_filename):
                _check_call(frame)
        if written > CHARACTERS:
            _check_size(written)
        return trace if _is_traced(frame.f_code.co_filename) else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    except TemplateLimit as error:
        raise ValueError(str(error)) from None
    finally:
        sys.settrace(before)


@functools.cache
def _is_jinja(file: str) -> bool:
    return file == "<template>" or "jinja2" in file


@functools.cache
def _makes_texts(code: Any) -> bool:
    """Whether a function may make a text out of its arguments: jinja2's filters, its sandbox's calls, others' functions."""
    return not _is_jinja(code.co_filename) or code.co_name == "call" or "do_" in code.co_name


@functools.cache
def _is_traced(file: str) -> bool:
    return _is_jinja(file) or file.endswith("textwrap.py")  # what a filter may spend long in


class _Scale:
    """How long texts of lists would be. Lists of lists that share parts are small, and printing them is one operation.

    Templates cannot change a list, so each is weighed once.
    """

    def __init__(self) -> None:
        self.known: dict[int, tuple[Any, int]] = {}

    def largest(self, values: Iterable[Any]) -> int:
        """The longest text of the lists among these values, and of those that jinja2's namespaces hold."""
        held = list(values)
        for value in [*held]:
            if _is_namespace(type(value)):  # it hides its attributes, which change
                for attributes in object.__getattribute__(value, "__dict__").values():
                    held += attributes.values()
        return max((self.of(value) for value in held if isinstance(value, list | tuple | dict)), default=0)

    def of(self, value: Any) -> int:
        if isinstance(value, str):
            return len(value)
        if not isinstance(value, list | tuple | dict):
            return 1
        if len(value) > ENTRIES:
            return CHARACTERS + 1  # not worth the time that weighing it takes
        if id(value) not in self.known:
            inner = value.values() if isinstance(value, dict) else value
            self.known[id(value)] = value, 2 + sum(map(self.of, inner))
        return self.known[id(value)][1]


@functools.cache
def _is_namespace(kind: type) -> bool:
    """Whether this is jinja2's class of namespaces or one made from it."""
    return any(cls.__name__ == "Namespace" and _is_jinja(cls.__module__) for cls in kind.__mro__)


def _check_size(size: float) -> None:
    if size > CHARACTERS:
        raise TemplateLimit(f"it wrote more than {CHARACTERS:,} characters")


def _check_call(frame: Any) -> None:
    """Refuses a call that would make too long a text: a filter's, or one of a text's method by jinja2's sandbox."""
    values = [*frame.f_locals.values()]
    values += [inner for value in values if type(value) is tuple for inner in value]
    values += [*frame.f_locals["kwargs"].values()] if type(frame.f_locals.get("kwargs")) is dict else []
    for value in values:
        if type(value) is int:
            _check_size(abs(value))
    name, texts = frame.f_code.co_name, [value for value in values if isinstance(value, str)]
    method = next((value for value in values if isinstance(getattr(value, "__self__", None), str)), None)
    if method is not None:
        name, texts = method.__name__, [method.__self__, *texts]
    if "replace" in name and len(texts) >= 3:
        _check_size((len(texts[0]) // max(1, len(texts[1])) + 1) * len(texts[2]))
    elif "join" in name and texts:
        _check_size(len(texts[-1] if method is None else texts[0]) * max(map(_length, values)))
    elif "format" in name and any(map(_WIDTH.search, texts)):
        _check_size(math.inf)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _times(left: Any, right: Any) -> Any:
    for one, other in ((left, right), (right, left)):
        if isinstance(one, list | tuple) and any(isinstance(inner, list | tuple | dict) for inner in one):
            raise TemplateLimit("it repeats a list of lists")
        if isinstance(one, str | list | tuple) and isinstance(other, int):
            _check_size(len(one) * other)
    return operator.mul(left, right)


def _power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        _check_size(left.bit_length() * right)
    return operator.pow(left, right)


def _remainder(left: Any, right: Any) -> Any:
    if isinstance(left, str):
        given = right if isinstance(right, tuple) else (right,)
        _check_size(max((abs(value) for value in given if type(value) is int and "*" in left), default=0))
        _check_size(math.inf if _WIDTH.search(left) else 0)
    return operator.mod(left, right)


@functools.cache
def _guard_operators() -> None:
    """Has jinja2's sandbox look at operands first, by the tables that it has for that; results stay what they are."""
    from jinja2.sandbox import SandboxedEnvironment  # importing it is not the template's time

    own = {"*": _times, "**": _power, "%": _remainder}
    SandboxedEnvironment.default_binop_table = {**SandboxedEnvironment.default_binop_table, **own}
    SandboxedEnvironment.intercepted_binops |= own.keys()
