"""Texts of errors and warnings: values and foreign text in one line without control characters."""

import functools
import logging
import re
import reprlib
from typing import Any, TypeVar

T = TypeVar("T")
logger = logging.getLogger("treeflash_jax")  # of the whole library

LONGEST_VALUE = 60  # most characters of a value in a message
LONGEST_PATH = 120  # most characters of a path in a message
LONGEST_MESSAGE = 300  # most characters of a message
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # control characters, except tabs and line breaks

_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxother, _short.maxlong = 3, LONGEST_VALUE, LONGEST_VALUE, LONGEST_VALUE
_short.maxlist = _short.maxtuple = _short.maxset = _short.maxdict = 8


def quoted(value: Any, size: int = LONGEST_VALUE) -> str:
    """Formats any value for a message: one line of at most `size` characters."""
    try:
        text = _short.repr(value)
    except Exception:  # raised by the value's __repr__
        text = type(value).__name__
    return clipped(text.encode("utf-8", "backslashreplace").decode(), size)


def printable(text: str) -> str:
    """Replaces control characters, which terminals obey, by escapes such as \\x1b. Tabs and line breaks stay."""
    return CONTROLS.sub(lambda match: repr(match[0])[1:-1], text)


def clipped(text: object, size: int = LONGEST_MESSAGE) -> str:
    """Formats text, such as an error or a name from a file, as one line of at most `size` characters for a message."""
    line = printable(" ".join(str(text).split()))
    return line if len(line) <= size else line[: size - 4] + " ..."


@functools.lru_cache(maxsize=1024)
def warn(text: str) -> None:
    """Logs a warning of one line, each text once in a process."""
    logger.warning(clipped(text))


def clipping(function: T) -> T:
    """Makes a function clip its errors to one line, because they quote names and contents of files."""

    @functools.wraps(function)
    def checked(*args: Any, **keywords: Any) -> Any:
        try:
            return function(*args, **keywords)
        except (ValueError, FileNotFoundError) as error:
            error.args = (clipped(error),)
            raise

    return checked
