"""Checks of users' values: types, limits, and suggestions for unknown names."""

import difflib
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from treeflash_jax.core.conversion import Mismatch, convert
from treeflash_jax.core.error_text import clipped, quoted

INT32 = 2**31 - 1
LIMITS = {  # keywords of limits on numbers, with their tests and their words in messages
    "least": (operator.ge, "at least"),
    "most": (operator.le, "at most"),
    "above": (operator.gt, "above"),
    "below": (operator.lt, "below"),
}


def expect(is_met: bool, name: str, value: Any, expected: str, where: str = "") -> None:
    """Raises ValueError unless `is_met`. The message has the value, what was expected, and the file or prompt `where`."""
    if not is_met:
        raise refusal(name, value, expected, where)


class WrongValue(ValueError):
    """Raised for a wrong value. Its text is "got NAME ENDING", after the file or prompt `where`, if any.

    Attributes:
      name: name of the value.
    """

    def __init__(self, name: str, ending: str, where: str = ""):
        super().__init__((f"{where}: " if where else "") + f"got {name} {ending}")
        self.name, self._ending, self._where = name, ending, where

    def renamed(self, name: str) -> "WrongValue":
        """Returns the error with another name of the value."""
        return WrongValue(name, self._ending, self._where)


class NoRoom(ValueError):
    """Raised if a prompt and its answer exceed the verifier's context, or the memory of the device."""


def refusal(name: str, value: Any, expected: str, where: str = "") -> WrongValue:
    """Returns the error of `expect`, to be raised."""
    return WrongValue(name, f"{quoted(value)}, expected {expected}", where)


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
      where: file or prompt with the value, if any.
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
        raise refusal(name, mismatch.part, says or mismatch.expected, where) from None
    if min_length:
        expect(len(fitted) >= min_length, name, value, says or f"a list of at least {min_length}", where)
    for number in _numbers(fitted) if limits else ():
        for limit, most in limits.items():
            is_within, words = LIMITS[limit]
            if not is_within(number, most):
                raise refusal(name, number, says or f"{words} {most}", where)
    if choices is not None and fitted is not None and fitted not in choices():
        expected = ", ".join(map(repr, choices()))
        if len(choices()) > 1:
            expected = f"one of {expected}" + (hint(fitted, choices()) if isinstance(fitted, str) else "")
        raise refusal(name, fitted, expected, where)
    return fitted


def _numbers(value: Any) -> Iterator[float]:
    """Yields a number, or all numbers in a list and its sublists."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, int | float):
        yield value


def integer(value: Any, name: str, least: int = 0, most: int = INT32) -> int:
    """Returns an integer from `least` to `most` as Python's int. Raises ValueError for any other value."""
    return coerce(int, value, name, least=least, most=most, says=f"{least} to {most}" if most < INT32 else "")


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
