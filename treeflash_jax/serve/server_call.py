"""The calls that requests of all protocols are turned into, and the pieces of their answers."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from treeflash_jax.constraints.compilation import CONSTRAINT_NAMES
from treeflash_jax.core.checks import WrongValue, expect
from treeflash_jax.engine.answers.results import Result
from treeflash_jax.engine.call.prompts import Chat, Prompt
from treeflash_jax.formats.messages.message_format import Content, Function, FunctionCall, Part, Thought
from treeflash_jax.serve.log_probs import TokenPosition

MOST_SAMPLES = 128


@dataclass(frozen=True)
class Tools:
    """Functions that an answer may call, and the rules for calling them.

    Attributes:
      described: functions that the chat template describes, in the form of OpenAI's chat API.
      allowed: names of the functions that may be called; None for all.
      is_forced: whether an answer has to call a function.
      is_parallel: whether an answer may have several calls.
    """

    described: Sequence[dict[str, Any]] = ()
    allowed: frozenset[str] | None = None
    is_forced: bool = False
    is_parallel: bool = True

    @property
    def functions(self) -> list[Function]:
        """The functions that may be called."""
        functions = []
        for tool in self.described:
            function = tool["function"]
            if self.allowed is None or function["name"] in self.allowed:
                parameters = function.get("parameters") or {"type": "object"}
                is_strict = self.is_forced or bool(function.get("strict"))
                functions.append(Function(function["name"], parameters, is_strict))
        return functions

    def check(self) -> None:
        """Raises ValueError for names that cannot stand in a call, unknown allowed functions, and forced calls of none."""
        names = {tool["function"]["name"] for tool in self.described}
        for name in names:
            expect(not re.search(r"[\s<>]", name), "name of a tool", name, "one without white space, '<' and '>'")
        unknown = sorted((self.allowed or frozenset()) - names)
        expect(not unknown, "tool_choice", ", ".join(unknown), f"one of tools: {', '.join(sorted(names)) or 'none'}")
        if self.is_forced and not self.functions:
            raise WrongValue("tool_choice", "that demands a call, but no tools to call")


@dataclass(frozen=True, kw_only=True)
class ServerCall:
    """A call of the server.

    Attributes:
      settings: settings that the client gives, by their names in this library.
      streams: whether pieces of answers are sent while answers grow.
      ends_with_context: whether an answer ends early if the context has no room for its largest number of new tokens.
      echoes: whether answers begin with the text of their prompt, and, if requested, its log-probabilities.
      sent_names: for settings to which the client gave another name: that name, by the name in this library.
    """

    prompts: list[Prompt]
    settings: dict[str, Any]
    tools: Tools = Tools()
    streams: bool = False
    ends_with_context: bool = False
    echoes: bool = False
    sent_names: dict[str, str] = field(default_factory=dict)

    @property
    def num_answers(self) -> int:
        return len(self.prompts) * self.settings.get("samples", 1)

    @property
    def is_chat(self) -> bool:
        return bool(self.prompts) and isinstance(self.prompts[0], Chat)

    @property
    def wants_log_probs(self) -> bool:
        return self.settings.get("log_probs", False)

    @property
    def has_structure(self) -> bool:
        """True if the client requested a structure for the content of answers."""
        return any(name in self.settings for name in CONSTRAINT_NAMES)


class Usage(NamedTuple):
    """Numbers of tokens of a call. A prompt with several answers counts once.

    Attributes:
      cached_tokens: number of prompt tokens that were not read again, because an earlier request left their caches.
    """

    prompt_tokens: int
    answer_tokens: int
    cached_tokens: int

    @staticmethod
    def count(results: Sequence[Result], num_prompts: int) -> "Usage":
        first_results = results[:: len(results) // num_prompts]
        return Usage(
            prompt_tokens=sum(len(result.prompt_ids) for result in first_results),
            answer_tokens=sum(len(result.ids) for result in results),
            cached_tokens=sum(result.reused for result in first_results),
        )


@dataclass(frozen=True)
class Delta:
    """A piece of one answer: parts, and tokens with their log-probabilities if the client requests them.

    Attributes:
      finished: why the answer ended ("calls": with calls of functions); None while it grows.
      stop: the stop string that ended the answer, if one did.
    """

    index: int
    parts: list[Part]
    positions: list[TokenPosition] | None = None
    finished: Literal["stop", "length", "calls"] | None = None
    stop: str | None = None

    def text(self, kind: type[Content] | type[Thought]) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, kind))

    @property
    def function_calls(self) -> list[FunctionCall]:
        return [part for part in self.parts if isinstance(part, FunctionCall)]
