"""OpenAI's API as data: bodies of requests, and the forms of answers, streamed chunks and errors.

Fields of the bodies that are not listed are ignored. None is the default of every field, as clients send it.
"""

import functools
import inspect
import json
import secrets
import time
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, create_model

from treeflash_jax.core.checks import expect
from treeflash_jax.engine.answers.results import Result
from treeflash_jax.engine.call.prompts import Chat, Prompt, Text
from treeflash_jax.engine.settings.generate_config import GenerateConfig, number_types
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.serve.constraint_fields import FAIL_FAST, ConstraintFields
from treeflash_jax.serve.log_probs import Place, PlaceReader, chat_form, completion_form
from treeflash_jax.serve.message_blocks import CALL, THINK, BlockParser
from treeflash_jax.serve.worker import TOP_LOG_PROBS, Piece

MOST_SAMPLES = 128
Ids = Annotated[list[int], FAIL_FAST]
B = TypeVar("B", bound="Body")
COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions


class StreamOptions(BaseModel):
    include_usage: bool | None = None


class Body(ConstraintFields):
    """Fields of both kinds of requests. `with_numbers` adds those of the settings with a number for every request."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], FAIL_FAST] | None = None
    logit_bias: dict[int, float] | None = None
    numbers: ClassVar[tuple[str, ...]] = ()

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def num_answers(self) -> int:
        return self.num_prompts * max(1, self.n or 1)

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def settings(self) -> dict[str, Any]:
        """Returns the settings that the client gives, by our names. Raises ValueError for too large an `n`."""
        expect((self.n or 1) <= MOST_SAMPLES, "n", self.n, f"at most {MOST_SAMPLES}")
        settings = {name: getattr(self, name) for name in self.numbers}
        if settings.get("top_k") == -1:  # off, as vLLM's clients say it
            settings["top_k"] = 0
        settings |= {"samples": self.n, "stop": self.stop, "logit_bias": self.logit_bias}
        settings |= {"seed": None if self.seed is None else self.seed % 2**32, "max_new_tokens": self.max_new_tokens()}
        return {name: value for name, value in settings.items() if value is not None} | self.constraint()

    def max_new_tokens(self) -> int | None:
        return self.max_tokens


class ChatBody(Body):
    """Body of a request to /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], FAIL_FAST]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[dict[str, Any]], FAIL_FAST] | None = None
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """Tools that the answer may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    def prompts(self) -> list[Prompt]:
        """Returns the chat.

        Raises ValueError for a `tool_choice` that demands a call, and for `chat_template_kwargs` with arguments of the
        function that renders: a template from the request could run for ever.
        """
        expect(self.tool_choice in (None, "none", "auto"), "tool_choice", self.tool_choice, "'auto' or 'none'")
        template = self.chat_template_kwargs or {}
        reserved = sorted(template.keys() & _renderer_arguments()) if template else []
        expect(not reserved, "chat_template_kwargs", reserved, "variables of the model's chat template only")
        messages = [_with_parsed_arguments(message) for message in self.messages]
        return [Chat(messages, self.offered_tools, bool(self.continue_final_message), template)]

    def max_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def num_log_probs(self) -> int | None:
        """Returns the number of likeliest tokens in the place of each; None without log-probabilities."""
        expect(self.logprobs or not self.top_logprobs, "top_logprobs", self.top_logprobs, "logprobs true with it")
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(Body):
    """Body of a request to /v1/completions."""

    prompt: str | Ids | Annotated[list[str], FAIL_FAST] | Annotated[list[Ids], FAIL_FAST]
    logprobs: int | None = None
    echo: bool | None = None

    @property
    def num_prompts(self) -> int:
        is_one = isinstance(self.prompt, str) or (bool(self.prompt) and isinstance(self.prompt[0], int))
        return 1 if is_one else len(self.prompt)

    def prompts(self) -> list[Prompt]:
        """Returns the prompts. Raises ValueError for `echo`."""
        expect(not self.echo, "echo", self.echo, "false: answers contain new tokens only")
        if isinstance(self.prompt, str):
            return [Text(self.prompt)]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return [Text(prompt) if isinstance(prompt, str) else prompt for prompt in self.prompt]

    def max_new_tokens(self) -> int | None:
        return COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    def num_log_probs(self) -> int | None:
        return self.logprobs


def with_numbers(body: type[B], config: type[GenerateConfig]) -> type[B]:
    """Returns a kind of body with a field for every setting that gives a request a number."""
    types = number_types(config)
    fields: dict[str, Any] = {name: (number | None, None) for name, number in types.items()}
    kind = create_model(body.__name__, __base__=body, __doc__=body.__doc__, **fields)
    kind.numbers = tuple(types)
    return kind


@functools.cache
def _renderer_arguments() -> set[str]:
    """Returns the arguments of transformers' function that renders chats, without `documents`, which templates read."""
    from transformers import PreTrainedTokenizerBase  # late: loading a tokenizer sets the log level first

    return {"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {"documents"}


def _with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Returns a message whose tool calls have objects as arguments, which chat templates expect, in place of JSON."""
    if not isinstance(message.get("tool_calls"), list):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                call = {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
            except ValueError:
                pass  # the template gets the text
        calls.append(call)
    return {**message, "tool_calls": calls}


class Form:
    """Forms of the answers to one request.

    Attributes:
      top: number of likeliest tokens in the place of each; None without log-probabilities.
    """

    prefix, kind, chunk_kind = "", "", ""
    log_probs_form: Callable[[list[Place]], dict[str, Any]]

    def __init__(self, model: str, tokenizer: Tokenizer | None, body: "ChatBody | CompletionBody"):
        top = body.num_log_probs()
        expect(0 <= (top or 0) <= TOP_LOG_PROBS, "number of log-probabilities", top, f"0 to {TOP_LOG_PROBS}")
        self.model, self.tokenizer, self.top = model, tokenizer, top
        self.id, self.created = f"{self.prefix}-{secrets.token_hex(12)}", int(time.time())
        self._readers: dict[int, PlaceReader] = {}  # by index of the answer

    def make_object(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices, **more}

    def whole(self, results: list[Result], prompts: int) -> dict[str, Any]:
        """Returns the answer that is not streamed."""
        choices = [self.choice(index, result) for index, result in enumerate(results)]
        return self.make_object(self.kind, choices, usage=count_usage(results, prompts))

    def begin(self, index: int) -> list[dict[str, Any]]:
        """Returns the chunks before the first piece of an answer."""
        return []

    def piece(self, piece: Piece) -> dict[str, Any]:
        """Returns the chunk of a piece."""
        choice = self.delta(piece) | {"index": piece.index, "finish_reason": None}
        if piece.is_last:
            choice["finish_reason"] = self.finish_reason(piece.index, piece.result)
        return self.make_object(self.chunk_kind, [choice])

    def finish_reason(self, index: int, result: Result) -> str:
        return "length" if result.finished == "length" else "stop"

    def choice(self, index: int, result: Result) -> dict[str, Any]:
        """Returns a whole answer."""
        raise NotImplementedError

    def delta(self, piece: Piece) -> dict[str, Any]:
        """Returns what a piece adds to an answer."""
        raise NotImplementedError

    def log_probs(self, index: int, result: Result, *, is_last: bool = True) -> dict[str, Any] | None:
        """Returns the log-probabilities of the tokens that are new in an answer; None unless requested."""
        if self.top is None:
            return None
        if index not in self._readers:
            self._readers[index] = PlaceReader(self.tokenizer, result.prompt_ids, self.top)
        return self.log_probs_form(self._readers[index].read(result, is_last=is_last))


class ChatForm(Form):
    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    log_probs_form = staticmethod(chat_form)

    def __init__(self, model: str, tokenizer: Tokenizer | None, body: ChatBody):
        super().__init__(model, tokenizer, body)
        template = str(tokenizer.inner.chat_template) if tokenizer else ""
        self._is_free = not body.constraint()  # others have no blocks, but for thoughts before them
        self._tools = body.offered_tools if self._is_free and CALL[0] in template else []
        self._has_thoughts = THINK[0] in template or THINK[1] in template
        self._parsers: dict[int, BlockParser] = {}  # by index of the answer

    def choice(self, index: int, result: Result) -> dict[str, Any]:
        message = {"role": "assistant", "content": None, "refusal": None}
        for delta in self._parser(index, result).feed(result.text, is_last=True):
            for name, value in delta.items():
                message[name] = (message.get(name) or type(value)()) + value
        for call in message.get("tool_calls", ()):
            del call["index"]
        if "tool_calls" not in message:
            message["content"] = message["content"] or ""
        choice = {"index": index, "message": message, "logprobs": self.log_probs(index, result)}
        return choice | {"finish_reason": self.finish_reason(index, result)}

    def begin(self, index: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return [self.make_object(self.chunk_kind, [choice])]

    def delta(self, piece: Piece) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        for part in self._parser(piece.index, piece.result).feed(piece.chunk.text, is_last=piece.is_last):
            for name, value in part.items():
                delta[name] = delta.get(name, type(value)()) + value
        return {"delta": delta, "logprobs": self.log_probs(piece.index, piece.result, is_last=piece.is_last)}

    def finish_reason(self, index: int, result: Result) -> str:
        reason = super().finish_reason(index, result)
        return "tool_calls" if reason == "stop" and self._parsers[index].num_calls else reason

    def _parser(self, index: int, result: Result) -> BlockParser:
        if index not in self._parsers:
            begins_in_thought = self._has_thoughts and self.tokenizer.begins_in_thought(result.prompt_ids)
            reads_thoughts = self._has_thoughts and self._is_free
            self._parsers[index] = BlockParser(
                reads_thoughts=reads_thoughts, tools=self._tools, begins_in_thought=begins_in_thought
            )
        return self._parsers[index]


class CompletionForm(Form):
    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    log_probs_form = staticmethod(completion_form)

    def choice(self, index: int, result: Result) -> dict[str, Any]:
        choice = {"index": index, "text": result.text, "logprobs": self.log_probs(index, result)}
        return choice | {"finish_reason": self.finish_reason(index, result)}

    def delta(self, piece: Piece) -> dict[str, Any]:
        log_probs = self.log_probs(piece.index, piece.result, is_last=piece.is_last)
        return {"text": piece.chunk.text, "logprobs": log_probs}


def count_usage(results: list[Result], num_prompts: int) -> dict[str, Any]:
    """Returns the numbers of tokens of a call; a prompt of several answers counts once."""
    samples = len(results) // num_prompts
    prompt = sum(len(result.prompt_ids) for result in results[::samples])
    reused = sum(result.reused for result in results[::samples])
    answer = sum(len(result.ids) for result in results)
    numbers = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
    return numbers | {"prompt_tokens_details": {"cached_tokens": reused}}


def make_error(message: str, kind: str = "invalid_request_error", code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
