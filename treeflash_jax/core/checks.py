"""Checks of users' values: types and limits, JSON files, quoting in one line, suggestions for unknown names."""

import difflib
import functools
import json
import logging
import operator
import os
import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from treeflash_jax.core.conversion import Mismatch, convert

T = TypeVar("T")
logger = logging.getLogger("treeflash_jax")

QUOTED = 60  # most characters of a value in a message
LONGEST_PATH = 120  # most characters of a path in a message
LINE = 300  # most characters of a message
INT32 = 2**31 - 1
LIMITS = {  # keywords of limits on numbers, with their tests and their words in messages
    "least": (operator.ge, "at least"),
    "most": (operator.le, "at most"),
    "above": (operator.gt, "above"),
    "below": (operator.lt, "below"),
}

CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # control characters, except tabs and line breaks

_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxother, _short.maxlong = 3, QUOTED, QUOTED, QUOTED
_short.maxlist = _short.maxtuple = _short.maxset = _short.maxdict = 8


def quoted(value: Any, size: int = QUOTED) -> str:
    """Formats any value for a message: one line of at most `size` characters."""
    try:
        text = _short.repr(value)
    except Exception:  # raised by the value's __repr__
        text = type(value).__name__
    return clipped(text.encode("utf-8", "backslashreplace").decode(), size)


def printable(text: str) -> str:
    """Replaces control characters, which terminals obey, by escapes such as \\x1b. Tabs and line breaks stay."""
    return CONTROLS.sub(lambda match: repr(match[0])[1:-1], text)


def clipped(text: object, size: int = LINE) -> str:
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


def expect(is_met: bool, name: str, value: Any, expected: str, where: str = "") -> None:
    """Raises ValueError unless `is_met`. The message has the value, what was expected, and the file `where`, if any."""
    if not is_met:
        raise _refusal(name, value, expected, where)


class WrongValue(ValueError):
    """Raised for a wrong value.

    Attributes:
      name: name of the value.
    """

    def __init__(self, text: str, name: str):
        super().__init__(text)
        self.name = name


def _refusal(name: str, value: Any, expected: str, where: str) -> ValueError:
    return WrongValue((f"{where}: " if where else "") + f"got {name} {quoted(value)}, expected {expected}", name)


def coerce(
    kind: Any,
    value: Any,
    name: str,
    where: str = "",
    *,
    says: str = "",
    from_text: bool = False,
    spelled: Callable[[Any], Any] | None = None,
    choices: Callable[[], Collection[str]] | None = None,
    min_length: int | None = None,
    **limits: float,
) -> Any:
    """Converts a value to `kind`, a type or a type hint such as `float | Sequence[float]`; sequences become tuples.

    Args:
      name: name of the value in messages.
      where: file that contains the value, if any.
      says: expected value in words; "": the name of the type.
      from_text: whether to accept texts as numbers and numbers as texts, as command lines need.
      spelled: function that returns the usual form of a value with several forms.
      choices: function that returns the accepted texts.
      min_length: smallest length of a list; 0 accepts an empty text.
      **limits: `least`, `most`, `above` and `below` of numbers, also in lists.

    Raises ValueError for any other value.
    """
    if min_length == 0 and value == "":
        return value
    try:
        fitted = convert(kind, value if spelled is None else spelled(value), from_text)
    except Mismatch as mismatch:
        raise _refusal(name, mismatch.part, says or mismatch.expected, where) from None
    if min_length:
        expect(len(fitted) >= min_length, name, value, says or f"a list of at least {min_length}", where)
    for number in _numbers(fitted) if limits else ():
        for limit, most in limits.items():
            is_within, words = LIMITS[limit]
            if not is_within(number, most):
                raise _refusal(name, number, says or f"{words} {most}", where)
    if choices is not None and fitted is not None and fitted not in choices():
        expected = ", ".join(map(repr, choices()))
        if len(choices()) > 1:
            expected = f"one of {expected}" + (hint(fitted, choices()) if isinstance(fitted, str) else "")
        raise _refusal(name, fitted, expected, where)
    return fitted


def _numbers(value: Any) -> Iterator[float]:
    """Yields a number, or all numbers in a list and its sublists."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, int | float):
        yield value


def whole(value: Any, name: str, least: int = 0, most: int = INT32) -> int:
    """Returns an integer from `least` to `most` as Python's int. Raises ValueError for any other value."""
    return coerce(int, value, name, least=least, most=most, says=f"{least} to {most}" if most < INT32 else "")


def parse_json(text: str | bytes) -> Any:
    """Parses JSON.

    Raises ValueError, without a file's name, for invalid JSON, deep nesting, and integers with too many digits.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("not valid JSON: nested too deeply") from None
    except ValueError as error:  # wrong syntax or UTF-8, or an integer of over 4,300 digits
        raise ValueError(f"not valid JSON: {clipped(error, LONGEST_PATH)}") from None


def read_json(path: str | os.PathLike) -> dict[str, Any]:
    """Reads a JSON file that contains an object. Raises FileNotFoundError, and ValueError for any other content."""
    try:
        raw = parse_json(Path(path).read_bytes())
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} not found; expected a Hugging Face model folder") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); expected a JSON file") from None
    except ValueError as error:
        raise ValueError(f"{path} is {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: got a JSON {type(raw).__name__}, expected an object")
    return raw


def read_jsonl(path: str | Path, *, start: bytes | None = None) -> list[tuple[int, dict[str, Any]]]:
    """Reads the objects of a JSONL file with their line numbers.

    If `start` is given, it is the text with which all lines begin. A last line that was cut off is then left out, with a
    warning.

    Raises FileNotFoundError. Raises ValueError for a file that cannot be read, or a line that is not a JSON object.
    """
    try:
        lines = Path(path).read_bytes().splitlines(keepends=True)
    except OSError as error:
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
        raise kind(f"cannot read {path}: {error.strerror}") from None
    objects = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = parse_json(line)
        except ValueError as error:
            if start is not None and not line.endswith(b"\n") and start.startswith(line[: len(start)]):
                warn(f"{path}:{number}: the last line is cut off and left out")
                break
            raise ValueError(f"{path}:{number}: got malformed JSON ({error}), expected one object a line") from None
        if not isinstance(value, dict):
            raise ValueError(f"{path}:{number}: got {type(value).__name__}, expected a JSON object")
        objects.append((number, value))
    return objects


# Names of settings in transformers, vLLM, OpenAI's API and llama.cpp, with our names for each. The first known one counts.
ALIASES = {
    "max_new_tokens": "max_tokens max_length max_completion_tokens max_output_tokens n_predict num_tokens new_tokens",
    "samples": "n num_return_sequences num_samples n_samples best_of",
    "temperature": "do_sample sample temp",
    "verifier": "model name model_id model_name model_name_or_path pretrained_model_name_or_path target_model base_model m "
    "pair",
    "shape": "model verifier",
    "drafter": "draft draft_model assistant_model speculative_model",
    "nodes": "tree_size num_nodes num_draft_tokens num_speculative_tokens num_assistant_tokens draft_tokens",
    "block_size": "gamma draft_length block",
    "acceptance": "rule verification",
    "stop": "stop_strings stop_sequences stop_words",
    "stop_ids": "eos_token_id eos_token_ids stop_token_ids eos",
    "log_probs": "logprobs logprob output_scores return_logprobs",
    "seed": "random_seed rng generator",
    "dtype": "torch_dtype data_type precision",
    "quantize": "quantization load_in_8bit load_in_4bit quant",
    "mesh": "tensor_parallel_size tensor_parallel device_map devices tp",
    "prompt": "p text input inputs",
    "chat": "message messages user question",
    "prompt_file": "file input_file prompts prompts_file",
    "out": "output output_file o",
}


def suggestion(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name that an unknown name, with underscores, is an alias of or resembles; None if there is none."""
    known = list(known)
    for ours, theirs in ALIASES.items():
        if ours in known and name in theirs.split():
            return ours
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return close[0] if close else None


def hint(name: str, known: Iterable[str]) -> str:
    """Returns "; did you mean ...?", the end of a message about an unknown name; "" if it resembles no known name."""
    meant = suggestion(name, known)
    return f"; did you mean {meant}?" if meant else ""


class UnknownSetting(TypeError):
    """A setting, keyword argument or option that does not exist."""


def refuse_unknown(names: Iterable[str], known: Collection[str], refused: Mapping[str, str] | None = None) -> None:
    """Raises UnknownSetting for the first keyword argument that is not known, naming what was probably meant.

    Args:
      refused: reasons why a function does not take certain names.
    """
    reasons = refused or {}
    for name in names:
        if name in known:
            continue
        meant = name if name in reasons else suggestion(name, [*known, *reasons])
        if meant in reasons:
            ending = f"; {meant} {reasons[meant]}"
        else:
            ending = f"; did you mean {meant}?" if meant else f", expected one of {clipped(', '.join(known), 200)}"
        raise UnknownSetting(f"got unknown argument {quoted(name)}{ending}")
