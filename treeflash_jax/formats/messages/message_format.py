"""The protocol of a form of messages, and the parts that answers are read as."""

import ast
import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from treeflash_jax.core.checks import parse_json

SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, as JSON's \\ud800 gives it: no UTF-8 has it
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
class Call:
    """A call of a function; `arguments` is JSON text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}", compare=False)


Part = Content | Thought | Call


@dataclass(frozen=True)
class Function:
    """A function that an answer may call.

    Attributes:
      parameters: JSON schema of its arguments.
      is_strict: whether the arguments of a call have to follow it.
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
      is_forced: whether it has to call a function instead of having content.
      is_parallel: whether it may have several calls.
    """

    content: Tag | None = None
    functions: Sequence[Function] = ()
    is_forced: bool = False
    is_parallel: bool = True


class MessageReader(ABC):
    """Reads one growing answer as parts.

    Attributes:
      num_calls: number of calls so far.
    """

    num_calls = 0

    @abstractmethod
    def feed(self, ids: Sequence[int], text: str, *, is_last: bool = False) -> list[Part]:
        """Returns the parts that new tokens add to an answer; `text` is what they add to its text."""


class MessageFormat(ABC):
    """A form of messages for models with a chat template. It has no state; the readers of answers do.

    Args:
      tokenizer: a `Tokenizer`.
      template: the chat template.

    Attributes:
      thoughts_key: key of a message under which the template looks for earlier thoughts.
      writes_calls: whether models with this template write calls in a form that is known here.
    """

    thoughts_key = "reasoning_content"
    writes_calls = True

    def __init__(self, tokenizer: Any, template: str):
        self.tokenizer, self.template = tokenizer, template

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an answer, in addition to the ids in the model's files."""
        return ()

    @classmethod
    @abstractmethod
    def fits(cls, template: str) -> bool:
        """Returns whether a chat template has this form."""

    @abstractmethod
    def reader(
        self, prompt_ids: Sequence[int], functions: Sequence[Function], stop: Sequence[str], *, has_thoughts: bool
    ) -> MessageReader:
        """Returns a reader of the answer to a prompt.

        Args:
          functions: functions that the answer may call; without any, calls stay text.
          stop: stop strings of the answer.
          has_thoughts: whether the answer may begin with thoughts that the prompt has not begun.
        """

    @abstractmethod
    def answer_tag(self, prompt_ids: Sequence[int], demands: Demands) -> Tag:
        """Returns the structural tag of the answer to a prompt, with the thoughts that may come before its content."""


def sequence(*elements: Tag) -> Tag:
    return {"type": "sequence", "elements": [*elements]}


def const(value: str) -> Tag:
    return {"type": "const_string", "value": value}


def any_text(*excludes: str) -> Tag:
    return {"type": "any_text", "excludes": [*excludes]}


def either(*elements: Tag) -> Tag:
    return {"type": "or", "elements": [*elements]}


def content_or_calls(demands: Demands, calls: Sequence[Tag], trigger: str, separator: str) -> Tag:
    """Returns the structural tag of content and calls in a form where calls may stand inside text.

    Args:
      calls: a tag for each function.
      trigger: the beginning of every call.
      separator: the text between two calls.
    """
    if not calls:
        return demands.content or any_text()
    more = {"tags": [*calls], "stop_after_first": not demands.is_parallel}
    if demands.content is None and not demands.is_forced:
        return {"type": "triggered_tags", "triggers": [trigger], **more}
    only_calls = {"type": "tags_with_separator", "separator": separator, "at_least_one": True, **more}
    return only_calls if demands.is_forced else either(demands.content, only_calls)


def join_parts(parts: list[Part]) -> list[Part]:
    """Joins texts of one kind that follow each other."""
    joined: list[Part] = []
    for part in parts:
        if joined and not isinstance(part, Call) and type(joined[-1]) is type(part):
            joined[-1] = type(part)(joined[-1].text + part.text)
        else:
            joined.append(part)
    return joined


def parse_value(text: str) -> Any:
    """Returns the value of JSON, or of the Python literal that models write instead. Raises ValueError."""
    try:
        return parse_json(text)
    except ValueError:
        try:
            value = ast.literal_eval(text.strip())
            return json.loads(json.dumps(value, allow_nan=False))
        except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
            raise ValueError(str(error)) from None


def make_call(name: Any, arguments: Any) -> Call:
    """Returns a call of arguments: a JSON value, or the JSON text of an object. Raises ValueError, TypeError.

    Half a character becomes U+FFFD.
    """
    if isinstance(arguments, str):
        try:
            value = parse_json(arguments or "{}")
        except ValueError:
            value = None
        arguments = value if isinstance(value, dict) else arguments
    text = json.dumps({} if arguments is None else arguments, ensure_ascii=False, allow_nan=False)
    return Call(SURROGATE.sub("\ufffd", str(name)), SURROGATE.sub("\ufffd", text))
