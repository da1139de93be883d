"""OpenAI's chat completions: POST /v1/chat/completions."""

from collections.abc import Iterable
from typing import Any

from treeflash_jax.core.checks import expect
from treeflash_jax.engine.call.prompts import Chat
from treeflash_jax.formats.messages.message_format import Content, Thought
from treeflash_jax.serve.log_probs import chat_form
from treeflash_jax.serve.protocols.exchange import Event, Served
from treeflash_jax.serve.protocols.fields import Body, Objects, check_template, top_settings
from treeflash_jax.serve.protocols.openai_objects import ChoicesExchange, StreamOptions
from treeflash_jax.serve.protocols.tool_choices import flat_choice, offered_tools
from treeflash_jax.serve.protocols.tools import read_chat_tools
from treeflash_jax.serve.server_call import Delta, ServerCall, Usage


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
        """Returns the arguments of the chat template. Raises the errors of `check_template`."""
        named = {"reasoning_effort": self.reasoning_effort, "enable_thinking": self.enable_thinking}
        given = {name: value for name, value in named.items() if value is not None}
        return given | check_template(self.chat_template_kwargs)


class ChatExchange(ChoicesExchange):
    path = "/v1/chat/completions"
    body_kind = ChatBody
    body: ChatBody
    id_prefix = "chatcmpl"
    object_type = "chat.completion"
    chunk_type = "chat.completion.chunk"

    def __init__(self, body: ChatBody, served: Served):
        super().__init__(body, served)
        self._num_calls: dict[int, int] = {}  # number of calls so far, by index of the answer

    def read_call(self) -> ServerCall:
        body = self.body
        top = body.top_logprobs or 0
        expect(body.logprobs or not top, "top_logprobs", top, "logprobs true with it")
        log_probs = top_settings(top, "top_logprobs") if body.logprobs else {}
        chat = Chat(body.messages, continued=bool(body.continue_final_message), template=body.template_arguments())
        functions = read_chat_tools(body.tools or [])
        is_parallel = body.parallel_tool_calls is not False
        return ServerCall(
            prompts=[chat],
            settings=body.settings() | log_probs,
            tools=offered_tools(functions, flat_choice(body.tool_choice), is_parallel),
            streams=bool(body.stream),
            sent_names=body.sent_names(),
        )

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

    def _choice(self, answer: Delta) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text(Content), "refusal": None}
        if thoughts := answer.text(Thought):
            message["reasoning_content"] = thoughts
        if calls := self._calls(answer):
            message |= {"content": message["content"] or None, "tool_calls": calls}
            for call in calls:
                del call["index"]
        return {"index": answer.index, "message": message, **self._ending(answer)}

    def _calls(self, delta: Delta) -> list[dict[str, Any]]:
        calls = []
        for call in delta.function_calls:
            number = self._num_calls.setdefault(delta.index, 0)
            self._num_calls[delta.index] += 1
            function = {"name": call.name, "arguments": call.arguments}
            calls.append({"index": number, "id": call.id, "type": "function", "function": function})
        return calls

    def _ending(self, delta: Delta) -> dict[str, Any]:
        log_probs = None if delta.positions is None else chat_form(delta.positions)
        reason = "tool_calls" if delta.finished == "calls" else delta.finished
        return {"logprobs": log_probs, "finish_reason": reason}
