"""OpenAI's completions of texts: POST /v1/completions."""

from collections.abc import Iterable
from typing import Annotated, Any

from treeflash_jax.engine.call.prompts import Prompt, Text
from treeflash_jax.formats.messages.message_format import Content
from treeflash_jax.serve.log_probs import completion_form
from treeflash_jax.serve.protocols.constraint_fields import FAIL_FAST
from treeflash_jax.serve.protocols.exchange import Event
from treeflash_jax.serve.protocols.fields import Body, Ids, top_settings
from treeflash_jax.serve.protocols.openai_objects import ChoicesExchange, StreamOptions
from treeflash_jax.serve.server_call import Delta, ServerCall, Usage

MOST_TOKENS = 16  # OpenAI's default


class CompletionBody(Body):
    """Body of a request to /v1/completions."""

    prompt: str | Ids | Annotated[list[str], FAIL_FAST] | Annotated[list[Ids], FAIL_FAST]
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None

    def settings(self) -> dict[str, Any]:
        settings = {"max_new_tokens": MOST_TOKENS} | super().settings()
        if self.logprobs is not None:
            settings |= top_settings(self.logprobs, "logprobs")
        if self.echo and (self.logprobs is not None or self.max_tokens == 0):
            settings["prompt_log_probs"] = True
        return settings

    def prompts(self) -> list[Prompt]:
        if isinstance(self.prompt, str):
            return [Text(self.prompt)]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return [Text(prompt) if isinstance(prompt, str) else prompt for prompt in self.prompt]


class CompletionExchange(ChoicesExchange):
    path = "/v1/completions"
    body_kind = CompletionBody
    body: CompletionBody
    id_prefix = "cmpl"
    object_type = chunk_type = "text_completion"

    def read_call(self) -> ServerCall:
        body = self.body
        return ServerCall(
            prompts=body.prompts(),
            settings=body.settings(),
            streams=bool(body.stream),
            echoes=bool(body.echo),
            sent_names=body.sent_names(),
        )

    def begin(self, usage: Usage) -> Iterable[Event]:
        return ()

    def add(self, delta: Delta) -> Iterable[Event]:
        yield self._chunk([self._choice(delta)])

    def _choice(self, answer: Delta) -> dict[str, Any]:
        log_probs = None if answer.positions is None else completion_form(answer.positions)
        text = answer.text(Content)
        return {"index": answer.index, "text": text, "logprobs": log_probs, "finish_reason": answer.finished}
