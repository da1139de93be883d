"""OpenAI's chat completions: POST /v1/chat/completions."""

import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel

from treeflash_jax.core.checks import expect
from treeflash_jax.engine.call.prompts import Chat
from treeflash_jax.formats.messages.message_format import Content, Thought
from treeflash_jax.serve.call import Delta, ServerCall, Usage
from treeflash_jax.serve.log_probs import chat_form
from treeflash_jax.serve.protocols.chat_messages import check_tools
from treeflash_jax.serve.protocols.exchange import Event, Exchange, Served
from treeflash_jax.serve.protocols.fields import Body, Objects, check_template
from treeflash_jax.serve.protocols.tool_choices import flat_choice, offered_tools
from treeflash_jax.serve.worker import TOP_LOG_PROBS


class StreamOptions(BaseModel):
    include_usage: bool | None = None


class ChatBody(Body):
    """Body of a request to /v1/chat/completions."""

    messages: Objects
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Objects | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    continue_final_message: bool | None = None
    length_fields = "max_completion_tokens", "max_tokens"

    def template_arguments(self) -> dict[str, Any]:
        """Returns arguments of the chat template. Raises as `check_template`."""
        named = {"reasoning_effort": self.reasoning_effort, "enable_thinking": self.enable_thinking}
        given = {name: value for name, value in named.items() if value is not None}
        return given | check_template(self.chat_template_kwargs)


class ChatExchange(Exchange):
    path = "/v1/chat/completions"
    body_kind = ChatBody
    body: ChatBody

    def __init__(self, body: ChatBody, served: Served):
        super().__init__(body, served)
        self.id = f"chatcmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._num_calls: dict[int, int] = {}  # by index of the answer

    def call(self) -> ServerCall:
        body = self.body
        top = body.top_logprobs or 0
        expect(body.logprobs or not top, "top_logprobs", top, "logprobs true with it")
        expect(0 <= top <= TOP_LOG_PROBS, "top_logprobs", top, f"0 to {TOP_LOG_PROBS}")
        chat = Chat(body.messages, continued=bool(body.continue_final_message), template=body.template_arguments())
        functions, is_parallel = check_tools(body.tools or []), body.parallel_tool_calls is not False
        return ServerCall(
            prompts=[chat],
            settings=body.settings(),
            tools=offered_tools(functions, flat_choice(body.tool_choice), is_parallel),
            streams=bool(body.stream),
            num_top=top if body.logprobs else None,
            sent_names=body.sent_names(),
        )

    def whole(self, answers: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        return self._object("chat.completion", [self._choice(answer) for answer in answers]) | {"usage": usage_form(usage)}

    def begin(self, usage: Usage) -> Iterable[Event]:
        for index in range(max(1, self.body.n or 1)):
            delta = {"role": "assistant", "content": ""}
            yield self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def add(self, delta: Delta) -> Iterable[Event]:
        message: dict[str, Any] = {}
        for name, kind in ("reasoning_content", Thought), ("content", Content):
            if text := delta.text(kind):
                message[name] = text
        if calls := self._calls(delta):
            message["tool_calls"] = calls
        yield self._chunk([{"index": delta.index, "delta": message, **self._ending(delta)}])

    def end(self, usage: Usage) -> Iterable[Event]:
        if self._includes_usage:
            yield Event(self._object("chat.completion.chunk", []) | {"usage": usage_form(usage)})
        yield Event("[DONE]")

    @property
    def _includes_usage(self) -> bool:
        return bool(self.body.stream_options and self.body.stream_options.include_usage)

    def _choice(self, answer: Delta) -> dict[str, Any]:
        message = {"role": "assistant", "content": answer.text(Content), "refusal": None}
        if thoughts := answer.text(Thought):
            message["reasoning_content"] = thoughts
        if calls := self._calls(answer):
            message |= {"content": message["content"] or None, "tool_calls": calls}
            for call in calls:
                del call["index"]
        return {"index": answer.index, "message": message, **self._ending(answer)}

    def _calls(self, delta: Delta) -> list[dict[str, Any]]:
        calls = []
        for call in delta.calls:
            number = self._num_calls.setdefault(delta.index, 0)
            self._num_calls[delta.index] += 1
            function = {"name": call.name, "arguments": call.arguments}
            calls.append({"index": number, "id": call.id, "type": "function", "function": function})
        return calls

    def _ending(self, delta: Delta) -> dict[str, Any]:
        log_probs = None if delta.places is None else chat_form(delta.places)
        return {"logprobs": log_probs, "finish_reason": "tool_calls" if delta.finished == "calls" else delta.finished}

    def _chunk(self, choices: list[dict[str, Any]]) -> Event:
        more = {"usage": None} if self._includes_usage else {}
        return Event(self._object("chat.completion.chunk", choices) | more)

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self.served.name, "choices": choices}


def usage_form(usage: Usage) -> dict[str, Any]:
    numbers = {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.answer,
        "total_tokens": usage.prompt + usage.answer,
    }
    return numbers | {"prompt_tokens_details": {"cached_tokens": usage.reused}}
