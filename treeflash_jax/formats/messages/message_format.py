"""The protocol of a message format, and the parts to which answers are parsed."""

import ast
import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

from treeflash_jax.core.conversion import SURROGATES
from treeflash_jax.core.json_files import parse_json
from treeflash_jax.formats.answer_text import AnswerText
from treeflash_jax.formats.tokenizer import Tokenizer

Tag = Mapping[str, Any]  # a structural tag, see constraints


@dataclass(frozen=True)
class Content:
    """Text of an answer."""

    text: str


@dataclass(frozen=True)
class Thought:
    """Text of the reasoning before an answer."""

    text: str


@dataclass(frozen=True)
class FunctionCall:
    """A call of a function; `arguments` is JSON text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}", compare=False)


Part = Content | Thought | FunctionCall


@dataclass(frozen=True)
class Function:
    """A function that an answer may call.

    Attributes:
      parameters: JSON schema of its arguments.
      is_strict: whether the arguments of a call must follow this schema.
    """

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool = False


@dataclass(frozen=True, kw_only=True)
class Demands:
    """Demands on an answer.

    Attributes:
      content: structure of the content; None for any text.
      functions: functions that the answer may call.
      is_forced: whether the answer must call a function instead of having content.
      is_parallel: whether the answer may have several calls.
    """

    content: Tag | None = None
    functions: Sequence[Function] = ()
    is_forced: bool = False
    is_parallel: bool = True


class MessageReader(ABC):
    """Parses a growing answer to parts."""

    @abstractmethod
    def feed(self, ids: Sequence[int], text: str, *, is_last: bool = False) -> list[Part]:
        """Returns the parts that new tokens add to an answer.

        A reader uses either `ids`, if special tokens delimit parts (`TokenReader`), or `text`.

        Args:
          ids: the new tokens.
          text: text that they add to the answer, without special tokens.
          is_last: whether the answer ends here.
        """


class TokenReader(MessageReader):
    """Parses an answer token by token, in formats whose parts are delimited by special tokens.

    Args:
      marker_names: names of the special tokens that delimit parts.
      stop: stop strings of the answer.
    """

    def __init__(self, tokenizer: Tokenizer, marker_names: Collection[str], stop: Sequence[str]):
        self._tokenizer, self._stop = tokenizer, stop
        self._markers = special_tokens(tokenizer, marker_names)
        self._begin_text()

    def feed(self, ids: Sequence[int], text: str, *, is_last: bool = False) -> list[Part]:
        parts = [part for id in ids for part in self._read(id)]
        if is_last:
            parts += self._end()
        return join_parts(parts)

    @abstractmethod
    def _read(self, id: int) -> list[Part]:
        """Returns the parts that a token completes, and the new text of a part."""

    @abstractmethod
    def _end(self) -> list[Part]:
        """Returns the parts that the end of the answer adds."""

    @abstractmethod
    def _new_parts(self, text: str) -> list[Part]:
        """Returns the parts that are new in the current block, whose text has grown."""

    def _begin_text(self, before: Sequence[int] = ()) -> None:
        """Begins the text of a block, which follows the tokens `before`."""
        self._text = AnswerText(self._tokenizer, before, self._stop)
        self._num_sent = 0

    def _extend_text(self, id: int) -> list[Part]:
        """Adds a token to the text unless it is a special token. Returns the parts that this adds."""
        if id in self._tokenizer.special_tokens:
            return []
        self._text.extend([id])
        return self._new_parts(self._text.certain_text)

    def _send_new(self, text: str, kind: type[Content] | type[Thought]) -> list[Part]:
        """Returns the part of a growing text that has not been sent yet."""
        new = text[self._num_sent :]
        self._num_sent = max(len(text), self._num_sent)
        return [kind(new)] if new else []


class MessageFormat(ABC):
    """A message format of models with a chat template. It has no state; its readers have.

    Args:
      template: the chat template.

    Attributes:
      stop_names: names of special tokens that end an answer, in addition to the ids in the model's files.
      thoughts_key: key of a message in which the template looks for earlier thoughts.
      writes_calls: whether models with this template write calls in a way that can be parsed here.
    """

    stop_names: ClassVar[tuple[str, ...]] = ()
    thoughts_key = "reasoning_content"
    writes_calls = True

    def __init__(self, tokenizer: Tokenizer, template: str):
        self.tokenizer, self.template = tokenizer, template

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids of `stop_names`; a tokenizer may lack some of them."""
        return tuple(special_tokens(self.tokenizer, self.stop_names))

    @classmethod
    @abstractmethod
    def fits(cls, template: str) -> bool:
        """Returns whether a chat template asks for this format."""

    @abstractmethod
    def reader(
        self, prompt_ids: Sequence[int], functions: Sequence[Function], stop: Sequence[str], *, has_thoughts: bool
    ) -> MessageReader:
        """Returns a reader of the answer to a prompt.

        Args:
          functions: functions that the answer may call; if there are none, calls stay text.
          stop: stop strings of the answer.
          has_thoughts: whether the answer may begin with thoughts that the prompt has not begun.
        """

    @abstractmethod
    def answer_tag(self, prompt_ids: Sequence[int], demands: Demands) -> Tag:
        """Returns the structural tag of the answer to a prompt, with the thoughts that may come before its content."""


def special_tokens(tokenizer: Tokenizer, names: Collection[str]) -> dict[int, str]:
    """Returns the names of a tokenizer's special tokens among `names`, by id."""
    return {id: name for id, name in tokenizer.special_tokens.items() if name in names}


def join_parts(parts: list[Part]) -> list[Part]:
    """Joins texts of one kind that follow each other."""
    joined: list[Part] = []
    for part in parts:
        if joined and not isinstance(part, FunctionCall) and type(joined[-1]) is type(part):
            joined[-1] = type(part)(joined[-1].text + part.text)
        else:
            joined.append(part)
    return joined


def parse_value(text: str) -> Any:
    """Returns the value of a text of JSON, or of a Python literal, which some models write instead. Raises ValueError."""
    try:
        return parse_json(text)
    except ValueError:
        try:
            value = ast.literal_eval(text.strip())
            return json.loads(json.dumps(value, allow_nan=False))
        except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
            raise ValueError(str(error)) from None


def parse_object(text: str) -> dict[str, Any] | None:
    """Returns the object that `parse_value` reads in a text; None if there is none."""
    with suppress(ValueError):
        value = parse_value(text)
        if isinstance(value, dict):
            return value
    return None


def make_function_call(name: Any, arguments: Any) -> FunctionCall | None:
    """Returns a call with arguments that are a JSON value, or the JSON text of an object; any other text stays a text.

    Returns None for arguments that JSON cannot hold: with NaN, or nested too deeply. Half a character becomes U+FFFD.
    """
    if isinstance(arguments, str):
        with suppress(ValueError):
            value = parse_json(arguments or "{}")
            call = make_function_call(name, value) if isinstance(value, dict) else None
            if call is not None:
                return call
    try:
        text = json.dumps({} if arguments is None else arguments, ensure_ascii=False, allow_nan=False)
        return FunctionCall(SURROGATES.sub("\ufffd", str(name)), SURROGATES.sub("\ufffd", text))
    except (ValueError, RecursionError):
        return None
