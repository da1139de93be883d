"""OpenAI's Responses API: POST /v1/responses, and GET and DELETE for stored responses."""

import json
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from treeflash_jax.core.checks import expect
from treeflash_jax.core.error_text import clipped
from treeflash_jax.engine.call.prompts import Chat
from treeflash_jax.serve.protocols.constraint_fields import ANY_OBJECT, FAIL_FAST
from treeflash_jax.serve.protocols.exchange import Event, Exchange, Served
from treeflash_jax.serve.protocols.fields import UNSUPPORTED, Body, Objects, check_template, top_settings
from treeflash_jax.serve.protocols.response_items import check_item, join_items
from treeflash_jax.serve.protocols.response_memory import MOST_MEMORY_BYTES, MOST_RESPONSES, ResponseMemory
from treeflash_jax.serve.protocols.response_output import ResponseOutput
from treeflash_jax.serve.protocols.tool_choices import offered_tools
from treeflash_jax.serve.protocols.tools import read_response_tools
from treeflash_jax.serve.server_call import Delta, ServerCall, Usage

T = TypeVar("T")
LOG_PROBS, ENCODED_THOUGHTS = "message.output_text.logprobs", "reasoning.encrypted_content"  # values of `include`


class TextFormat(BaseModel):
    """Form of the content: "text", "json_object", or "json_schema" with its schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = "answer"
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class TextField(BaseModel):
    format: TextFormat | None = None


class Reasoning(BaseModel):
    effort: str | None = None


class ResponsesBody(Body):
    """Body of a request to /v1/responses."""

    input: str | Objects = Field(default_factory=list)
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    tools: Objects | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextField | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: Annotated[list[str], FAIL_FAST] | None = None
    metadata: dict[str, str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    length_fields = ("max_output_tokens",)
    unsupported: ClassVar[dict[str, Any]] = UNSUPPORTED | dict.fromkeys(
        ("prompt", "max_tokens", "max_completion_tokens", "reasoning_effort")
    )

    def settings(self) -> dict[str, Any]:
        expect(self.n in (None, 1), "n", self.n, "1: a response is one answer")
        return super().settings()

    def constraints(self) -> dict[str, tuple[str, Any]]:
        form = self.text_format
        if form.type == "text":
            return super().constraints()
        expect(form.type == "json_object" or form.schema_ is not None, "text.format.schema", None, "a JSON schema")
        schema = ANY_OBJECT if form.type == "json_object" else form.schema_
        return super().constraints() | {"text.format.schema": ("schema", schema)}

    def template_arguments(self) -> dict[str, Any]:
        """Returns the arguments of the chat template. Raises the errors of `check_template`."""
        arguments = check_template(self.chat_template_kwargs)
        if self.reasoning is not None and self.reasoning.effort:
            return {"reasoning_effort": self.reasoning.effort} | arguments
        return arguments

    @property
    def text_format(self) -> TextFormat:
        if self.text is None or self.text.format is None:
            return TextFormat(type="text")
        return self.text.format

    @property
    def is_stored(self) -> bool:
        return self.store is not False


class ResponsesExchange(Exchange):
    path = "/v1/responses"
    body_kind = ResponsesBody
    body: ResponsesBody

    def __init__(self, body: ResponsesBody, served: Served):
        super().__init__(body, served)
        self.id = f"resp_{secrets.token_hex(24)}"
        self._created = int(time.time())
        self._memory = get_memory(served)
        self._includes = set(body.include or [])
        self._output = ResponseOutput(encodes_thoughts=ENCODED_THOUGHTS in self._includes)
        self._items: list[dict[str, Any]] = []  # items of the conversation up to this answer
        self._functions = read_response_tools(body.tools or [], served)
        self._status = "in_progress"
        self._num_events = 0

    def read_call(self) -> ServerCall:
        body = self.body
        top = body.top_logprobs or 0
        has_log_probs = LOG_PROBS in self._includes
        expect(has_log_probs or not top, "top_logprobs", top, f"include with {LOG_PROBS!r} beside it")
        settings = body.settings()
        if has_log_probs:
            settings |= top_settings(top, "top_logprobs")
        self._check_numbers()
        tools = offered_tools(self._functions, body.tool_choice, body.parallel_tool_calls is not False)
        self._items = self._conversation()
        return ServerCall(
            prompts=[Chat(join_items(self._items, body.instructions), template=body.template_arguments())],
            settings=settings,
            tools=tools,
            streams=bool(body.stream),
            sent_names=body.sent_names(),
        )

    def response(self, answers: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        [answer] = answers
        for _ in self._add(answer):
            pass
        return self._finish(usage)

    def begin(self, usage: Usage) -> Iterable[Event]:
        yield self._event("response.created", response=self._response())
        yield self._event("response.in_progress", response=self._response())

    def add(self, delta: Delta) -> Iterable[Event]:
        for name, fields in self._add(delta):
            yield self._event(name, **fields)

    def end(self, usage: Usage) -> Iterable[Event]:
        response = self._finish(usage)
        yield self._event(f"response.{self._status}", response=response)

    def failure(self, message: str) -> Event:
        self._status = "failed"
        error = {"code": "server_error", "message": message}
        return self._event("response.failed", response=self._response() | {"error": error})

    @classmethod
    def add_routes(cls, router: APIRouter, served: Served) -> None:
        memory = get_memory(served)

        @router.get(f"{cls.path}/{{id}}")
        async def show(id: str) -> Response:
            return Response(expect_stored(memory.response(id), "response", id), media_type="application/json")

        @router.delete(f"{cls.path}/{{id}}")
        async def delete(id: str) -> dict[str, Any]:
            expect_stored(memory.delete(id) or None, "response", id)
            return {"id": id, "object": "response", "deleted": True}

    def _conversation(self) -> list[dict[str, Any]]:
        """Returns the items before the answer: the conversation of `previous_response_id`, then `input`."""
        body = self.body
        sent = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
        for number, item in enumerate(sent):
            check_item(item, f"input.{number}")
        previous = body.previous_response_id
        items = []
        if previous is not None:
            items = expect_stored(self._memory.items(previous), "previous_response_id", previous)
        referenced = set()
        for number, item in enumerate(sent):
            if item.get("type") == "item_reference":
                id = item["id"]
                place = f"input.{number}.id"
                expect(id not in referenced, place, id, "one reference to each item")  # each reference copies the item
                referenced.add(id)
                item = expect_stored(self._memory.item(id), place, id)
            items.append(item)
        return items

    def _check_numbers(self) -> None:
        """Raises ValueError for NaN and infinity in fields that the response repeats, since JSON has neither."""
        try:
            json.dumps(self._response(), allow_nan=False)
        except ValueError:
            raise ValueError("got NaN or an infinite number, expected numbers that JSON has") from None

    def _add(self, delta: Delta) -> Iterable[tuple[str, dict[str, Any]]]:
        yield from self._output.add(delta)
        if delta.finished:
            self._status = "incomplete" if delta.finished == "length" else "completed"

    def _finish(self, usage: Usage) -> dict[str, Any]:
        """Returns the finished response, and stores it unless the client forbids that."""
        response = self._response(usage)
        if self.body.is_stored:
            self._memory.add(response, self._items + self._output.items)
        return response

    def _event(self, kind: str, **fields: Any) -> Event:
        self._num_events += 1
        return Event({"type": kind, "sequence_number": self._num_events - 1, **fields}, kind)

    def _response(self, usage: Usage | None = None) -> dict[str, Any]:
        body = self.body
        reason = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        settings = {name: getattr(body, name, None) for name in ("temperature", "top_p")}
        form = body.text_format.model_dump(by_alias=True, exclude_none=True)
        if form["type"] != "json_schema":
            form = {"type": form["type"]}
        return settings | {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "status": self._status,
            "background": False,
            "error": None,
            "incomplete_details": reason,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": self.served.name,
            "output": [*self._output.items],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "store": body.is_stored,
            "text": {"format": form},
            "tool_choice": body.tool_choice or "auto",
            "tools": [flat_tool(tool["function"]) for tool in self._functions],
            "top_logprobs": body.top_logprobs or 0,
            "truncation": "disabled",
            "usage": None if usage is None else response_usage(usage),
        }


def get_memory(served: Served) -> ResponseMemory:
    """Returns the server's memory of responses. The first call makes it."""
    return served.memory.setdefault(ResponsesExchange, ResponseMemory())


def expect_stored(value: T | None, name: str, id: str) -> T:
    """Returns `value`, which the memory has for an id. Raises HTTPException if it is None: the memory has no value."""
    if value is None:
        kept = f"among the last {MOST_RESPONSES} and {MOST_MEMORY_BYTES >> 20} MiB of them, not deleted"
        expected = f"that of a response with store true, {kept}"
        raise HTTPException(404, {"message": f"got {name} {clipped(id, 60)!r}, expected {expected}", "param": name})
    return value


def flat_tool(function: dict[str, Any]) -> dict[str, Any]:
    empty = {"description": None, "parameters": None}
    return {"type": "function", **empty, **function, "strict": bool(function.get("strict"))}


def response_usage(usage: Usage) -> dict[str, Any]:
    """Returns numbers of tokens. `reasoning_tokens` is always 0: the tokens of an answer's parts are not known."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.answer_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.answer_tokens,
    }
