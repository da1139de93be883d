"""Anthropic's messages: POST /v1/messages and /v1/messages/count_tokens."""

import json
import secrets
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from treeflash_jax.core.checks import expect
from treeflash_jax.engine.call.prompts import Chat
from treeflash_jax.formats.messages.message_format import Content, FunctionCall, Part, Thought
from treeflash_jax.serve.protocols.anthropic_blocks import join_blocks
from treeflash_jax.serve.protocols.constraint_fields import FAIL_FAST
from treeflash_jax.serve.protocols.exchange import Event, Exchange, Served
from treeflash_jax.serve.protocols.fields import Body, Objects, check_template
from treeflash_jax.serve.protocols.tools import read_anthropic_tools
from treeflash_jax.serve.server_call import Delta, ServerCall, Tools, Usage

ENDINGS = {"stop": "end_turn", "length": "max_tokens", "calls": "tool_use"}
ERRORS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
EFFORTS = {"xhigh": "high", "max": "high"}  # efforts that chat templates do not know, and their replacements
SIGNATURE = "unsigned"  # signature of thoughts; it is never checked, but some clients drop thoughts without one


class OutputFormat(BaseModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    format: OutputFormat | None = None
    effort: str | None = None


class Thinking(BaseModel):
    """Switches thoughts before answers on or off. `budget_tokens` and `display` are ignored."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: str | None = None


class ToolChoice(BaseModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessagesBody(Body):
    """Body of a request to /v1/messages."""

    max_tokens: int
    messages: Objects
    system: str | Objects | None = None
    stop_sequences: Annotated[list[str], FAIL_FAST] | None = None
    tools: Objects | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    context_management: Any = None
    chat_template_kwargs: dict[str, Any] | None = None

    def sent_names(self) -> dict[str, str]:
        return super().sent_names() | {"stop": "stop_sequences"}

    def settings(self) -> dict[str, Any]:
        expect(self.n in (None, 1), "n", self.n, "1: a response is one message")
        settings = super().settings()
        if self.stop_sequences is not None:
            settings["stop"] = self.stop_sequences
        return settings

    def constraints(self) -> dict[str, tuple[str, Any]]:
        config = self.output_config or OutputConfig()
        forms = {"output_config.format": config.format, "output_format": self.output_format}
        schemas = {field: ("schema", form.schema_) for field, form in forms.items() if form is not None}
        return super().constraints() | schemas

    def template_arguments(self) -> dict[str, Any]:
        """Returns the arguments of the chat template. Raises the errors of `check_template`."""
        given: dict[str, Any] = {}
        if self.thinking is not None:
            given["enable_thinking"] = self.thinking.type != "disabled"
        if self.output_config is not None and self.output_config.effort is not None:
            given["reasoning_effort"] = EFFORTS.get(self.output_config.effort, self.output_config.effort)
        return given | check_template(self.chat_template_kwargs)

    def offered_tools(self, served: Served) -> Tools:
        """Returns the tools of the call. Raises ValueError for a tool without a name or a schema."""
        choice = self.tool_choice or ToolChoice(type="auto")
        if choice.type == "none":
            return Tools()
        expect(choice.type != "tool" or choice.name is not None, "tool_choice.name", choice.name, "the name of a tool")
        return Tools(
            read_anthropic_tools(self.tools or [], served),
            frozenset([choice.name]) if choice.type == "tool" else None,
            is_forced=choice.type in ("any", "tool"),
            is_parallel=not choice.disable_parallel_tool_use,
        )

    def ignored_fields(self) -> Iterable[str]:
        """Yields the names of given fields that are accepted but ignored."""
        for name in ("budget_tokens", "display"):
            if self.thinking is not None and getattr(self.thinking, name) is not None:
                yield f"thinking.{name}"
        if self.context_management:
            yield "context_management"


class CountBody(MessagesBody):
    """Body of a request to /v1/messages/count_tokens."""

    max_tokens: int = 1


class MessagesExchange(Exchange):
    path = "/v1/messages"
    body_kind = MessagesBody
    counting_path = "/v1/messages/count_tokens"
    counted_kind = CountBody
    body: MessagesBody

    def __init__(self, body: MessagesBody, served: Served):
        super().__init__(body, served)
        self.id = f"msg_{secrets.token_hex(12)}"
        self._block: dict[str, Any] | None = None  # the open block of a stream
        self._index = 0  # index of the open block, or of the next one
        self._last: Delta | None = None

    def read_call(self) -> ServerCall:
        body = self.body
        self.served.note(f"{self.path}: {name} is ignored" for name in body.ignored_fields())
        messages = join_blocks(body.system, body.messages)
        continued = bool(messages) and messages[-1]["role"] == "assistant"
        if continued:
            can_continue = "tool_calls" not in messages[-1] and any(part["text"] for part in messages[-1]["content"])
            expect(can_continue, "messages", messages[-1]["role"], "a user's message at the end, or text to continue")
        return ServerCall(
            prompts=[Chat(messages, continued=continued, template=body.template_arguments())],
            settings=body.settings(),
            tools=body.offered_tools(self.served),
            streams=bool(body.stream),
            ends_with_context=True,
            sent_names=body.sent_names(),
        )

    def response(self, answers: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        [answer] = answers
        blocks: list[dict[str, Any]] = []
        for part in answer.parts:
            block = _empty_block(part)
            if isinstance(part, FunctionCall):
                blocks.append(block | {"input": _read_input(part)})
                continue
            if not blocks or blocks[-1]["type"] != block["type"]:
                blocks.append(block)
            blocks[-1]["thinking" if isinstance(part, Thought) else "text"] += part.text
        for block in blocks:
            if block["type"] == "thinking":
                block["signature"] = SIGNATURE
        return self._message(blocks, usage) | self._ending(answer, usage)

    def begin(self, usage: Usage) -> Iterable[Event]:
        yield _event("message_start", message=self._message([], usage))

    def add(self, delta: Delta) -> Iterable[Event]:
        for part in delta.parts:
            block = _empty_block(part)
            if isinstance(part, FunctionCall) or self._block is None or self._block["type"] != block["type"]:
                yield from self._end_block()
                self._block = block
                yield _event("content_block_start", index=self._index, content_block=block)
            yield self._delta(_block_delta(part))
        if delta.finished:
            self._last = delta

    def end(self, usage: Usage) -> Iterable[Event]:
        yield from self._end_block()
        yield _event("message_delta", delta=self._ending(self._last, usage), usage=message_usage(usage))
        yield _event("message_stop")

    def count(self, num_tokens: int) -> dict[str, Any]:
        return {"input_tokens": num_tokens}

    @classmethod
    def error(cls, status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
        kind = ERRORS.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}

    def failure(self, message: str) -> Event:
        return Event(self.error(500, message), "error")

    def _end_block(self) -> Iterable[Event]:
        if self._block is None:
            return
        if self._block["type"] == "thinking":
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        yield _event("content_block_stop", index=self._index)
        self._block = None
        self._index += 1

    def _delta(self, delta: dict[str, Any]) -> Event:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _ending(self, answer: Delta, usage: Usage) -> dict[str, Any]:
        if answer.finished == "stop" and answer.stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop}
        if answer.finished == "length" and usage.answer_tokens < self.body.max_tokens:
            return {"stop_reason": "model_context_window_exceeded", "stop_sequence": None}
        return {"stop_reason": ENDINGS[answer.finished], "stop_sequence": None}

    def _message(self, blocks: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        message = {"id": self.id, "type": "message", "role": "assistant", "model": self.served.name, "content": blocks}
        return message | {"stop_reason": None, "stop_sequence": None, "usage": message_usage(usage)}


def _event(kind: str, **fields: Any) -> Event:
    return Event({"type": kind, **fields}, kind)


def _empty_block(part: Part) -> dict[str, Any]:
    """Returns an empty block of the kind that a part belongs to."""
    if isinstance(part, FunctionCall):
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
    if isinstance(part, Thought):
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _block_delta(part: Part) -> dict[str, Any]:
    """Returns the delta that adds a part to its block."""
    if isinstance(part, FunctionCall):
        return {"type": "input_json_delta", "partial_json": json.dumps(_read_input(part), ensure_ascii=False)}
    if isinstance(part, Content):
        return {"type": "text_delta", "text": part.text}
    return {"type": "thinking_delta", "thinking": part.text}


def _read_input(call: FunctionCall) -> dict[str, Any]:
    """Returns the arguments of a call as an object. Any other JSON value becomes the field `input` of an object."""
    arguments = json.loads(call.arguments)
    return arguments if isinstance(arguments, dict) else {"input": arguments}


def message_usage(usage: Usage) -> dict[str, Any]:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": usage.cached_tokens}
    return {"input_tokens": usage.prompt_tokens - usage.cached_tokens, "output_tokens": usage.answer_tokens, **cached}
