"""Checks of users' values: types and limits, JSON files, quoting in one line, suggestions for unknown names.

pydantic checks types and limits; it is imported at the first check, since its import takes a tenth of a second.
"""

import difflib
import functools
import inspect
import json
import operator
import os
import re
import reprlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_origin

T = TypeVar("T")

QUOTED = 60  # characters of a value in a message
LONGEST_PATH = 120  # characters of a path in a message
LINE = 300  # characters of a message
INT32 = 2**31 - 1
LIMITS = {  # of numbers, with their words in messages
    "least": (operator.ge, "at least"),
    "most": (operator.le, "at most"),
    "above": (operator.gt, "above"),
    "below": (operator.lt, "below"),
}

PLAIN = {bool, int, float, str}
WORDS = {  # patterns in pydantic's messages and their replacements
    r"\w+ should (be|have) |Unable to parse \w+ \w+ as |, (unable|exceeded)[^,]*?(?= or |$)| after validation, not 0": "",
    r"an instance of Sequence|a valid (tuple|list)|'\w+' instances are not allowed as a Sequence value": "a list",
}

CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # without tabs and line breaks

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
    """Replaces control characters other than tabs and line breaks, which terminals obey, by escapes such as \\x1b."""
    return CONTROLS.sub(lambda match: repr(match[0])[1:-1], text)


def clipped(text: object, size: int = LINE) -> str:
    """Formats text, such as a name in a file or an error, as one line of at most `size` characters for a message."""
    line = printable(" ".join(str(text).split()))
    return line if len(line) <= size else line[: size - 4] + " ..."


def warn(text: str) -> None:
    """Warns the caller of the calling function."""
    warnings.warn(clipped(text), stacklevel=3)


def clipping(function: T) -> T:
    """Makes a function raise errors of one line that is clipped: they name files and what is in them."""

    @functools.wraps(function)
    def checked(*args: Any, **keywords: Any) -> Any:
        try:
            return function(*args, **keywords)
        except (ValueError, FileNotFoundError) as error:
            error.args = (clipped(error),)
            raise

    return checked


def expect(is_met: bool, name: str, value: Any, expected: str, where: str = "") -> None:
    """Raises ValueError with the value, the expectation and the file `where`, if any, unless a condition is met."""
    if not is_met:
        raise ValueError((f"{where}: " if where else "") + f"got {name} {quoted(value)}, expected {expected}")


def fit(
    kind: Any,
    value: Any,
    name: str,
    where: str = "",
    *,
    says: str = "",
    from_text: bool = False,
    choices: Callable[[], Iterable[str]] | None = None,
    min_length: int | None = None,
    **limits: float,
) -> Any:
    """Converts a value to `kind`, a type or a type hint such as `float | Sequence[float]`; lists become tuples.

    Args:
      name: name of the value in messages.
      where: file that contains the value, if any.
      says: expectation in words, in place of pydantic's.
      from_text: accepts texts as numbers, as on command lines.
      choices: returns the accepted texts.
      min_length: smallest length of a list or text; None: 0 of a list, 1 of a text.
      **limits: `least`, `most`, `above` and `below` of numbers, also of those in lists.

    Raises ValueError for any other value.
    """
    try:
        fitted = _adapter(kind, min_length).validate_python(_without_arrays(value), strict=not from_text)
    except ValueError as error:
        errors = error.errors(include_url=False)
        depth = max(len(error["loc"]) for error in errors)  # a list's item rather than the list
        errors = [error for error in errors if len(error["loc"]) == depth]
        expected = says or " or ".join(dict.fromkeys(error["msg"] for error in errors))
        for theirs, ours in WORDS.items():
            expected = re.sub(theirs, ours, expected)
        expect(False, name, errors[0]["input"], expected, where)
    for number in _numbers(fitted) if limits else ():
        for limit, most in limits.items():
            is_within, words = LIMITS[limit]
            expect(is_within(number, most), name, number, says or f"{words} {most}", where)
    if choices is not None and fitted is not None and fitted not in choices():
        known = list(map(repr, choices()))
        expect(False, name, fitted, "one of " * (len(known) > 1) + ", ".join(known) + hint(fitted, choices()), where)
    return tuple(fitted) if isinstance(fitted, list) and get_origin(kind) is not list else fitted


def _numbers(value: Any) -> Iterator[float]:
    """Yields the numbers of a value: itself, or those in its lists."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, int | float):
        yield value


def _without_arrays(value: Any) -> Any:
    """Converts ranges, and arrays and scalars of NumPy and JAX, to numbers and lists."""
    if isinstance(value, range):
        return list(value)
    if hasattr(value, "tolist") and hasattr(value, "dtype"):
        return value.tolist()
    if type(value) not in (list, tuple) or {*map(type, value)} <= PLAIN:  # a vocabulary has 10^5 texts
        return value
    return type(value)(map(_without_arrays, value))


@functools.lru_cache(1024)
def _adapter(kind: Any, min_length: int | None) -> Any:
    import pydantic

    config = {"allow_inf_nan": False, "arbitrary_types_allowed": True, "coerce_numbers_to_str": True, "str_min_length": 1}
    return pydantic.TypeAdapter(Annotated[kind, pydantic.Field(min_length=min_length)], config=config)


def whole(value: Any, name: str, least: int = 0, most: int = INT32) -> int:
    """Converts an integer from `least` to `most` to Python's int. Raises ValueError for any other value."""
    return fit(int, value, name, least=least, most=most, says=f"{least} to {most}" if most < INT32 else "")


def parse_json(text: str | bytes) -> Any:
    """Parses JSON. Raises ValueError, without the file's name, for any other text, deep nesting and numbers too long."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("not valid JSON: nested too deeply") from None
    except ValueError as error:  # of syntax, UTF-8, or an integer of over 4,300 digits
        raise ValueError(f"not valid JSON: {clipped(error, LONGEST_PATH)}") from None


def read_json(path: str | os.PathLike) -> dict[str, Any]:
    """Reads the object of a JSON file. Raises FileNotFoundError, and ValueError for any other content."""
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


# Names in transformers, vLLM, OpenAI's API and llama.cpp by ours. The first known name counts.
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
    """Returns the known name that an unknown name is an alias of or resembles; None for neither. Names have underscores."""
    known = list(known)
    for ours, theirs in ALIASES.items():
        if ours in known and name in theirs.split():
            return ours
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return close[0] if close else None


def hint(name: str, known: Iterable[str]) -> str:
    """Returns the end of a message about an unknown name: "; did you mean ...?", or "" if it resembles no known one."""
    meant = suggestion(name, known)
    return f"; did you mean {meant}?" if meant else ""


class UnknownSetting(TypeError):
    """A setting, keyword argument or option that does not exist."""


def suggesting(function: T, **others: str) -> T:
    """Makes a function or class answer unknown keyword arguments with an UnknownSetting that names what was meant.

    `others` are names that it does not take, with the reason.
    """
    if isinstance(function, type):
        function.__init__ = suggesting(function.__init__, **others)
        return function
    known = [name for name in inspect.signature(function).parameters if name != "self"]

    @functools.wraps(function)
    def checked(*args: Any, **keywords: Any) -> Any:
        for name in keywords:
            if name not in known:
                meant = name if name in others else suggestion(name, [*known, *others])
                if meant in others:
                    ending = f"; {meant} {others[meant]}"
                else:
                    ending = hint(name, known) or f", expected one of {clipped(', '.join(known), 200)}"
                raise UnknownSetting(f"got unknown argument {quoted(name)}{ending}")
        return function(*args, **keywords)

    return checked
