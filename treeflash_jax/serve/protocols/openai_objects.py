"""Objects that OpenAI's chat completions and text completions share: choices and usage, whole or in chunks."""

import secrets
import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel

from treeflash_jax.serve.protocols.exchange import Event, Exchange, Served
from treeflash_jax.serve.server_call import Delta, Usage


class StreamOptions(BaseModel):
    include_usage: bool | None = None


class ChoicesExchange(Exchange):
    """One request whose answers are choices of one object, or of the chunks of a stream.

    Attributes:
      body: body of the request, with `stream_options`.
      id_prefix: beginning of the request's id.
      object_type: type of the object with whole answers.
      chunk_type: type of a chunk.
    """

    id_prefix: ClassVar[str]
    object_type: ClassVar[str]
    chunk_type: ClassVar[str]

    def __init__(self, body: Any, served: Served):
        super().__init__(body, served)
        self.id = f"{self.id_prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    def response(self, answers: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        choices = [self._choice(answer) for answer in answers]
        return self._object(self.object_type, choices) | {"usage": completion_usage(usage)}

    def end(self, usage: Usage) -> Iterable[Event]:
        if self._includes_usage:
            yield Event(self._object(self.chunk_type, []) | {"usage": completion_usage(usage)})
        yield Event("[DONE]")

    @abstractmethod
    def _choice(self, answer: Delta) -> dict[str, Any]:
        """Returns a whole answer as a choice."""

    def _chunk(self, choices: list[dict[str, Any]]) -> Event:
        chunk = self._object(self.chunk_type, choices)
        return Event(chunk | {"usage": None} if self._includes_usage else chunk)

    @property
    def _includes_usage(self) -> bool:
        return bool(self.body.stream_options and self.body.stream_options.include_usage)

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self.served.name, "choices": choices}


def completion_usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.answer_tokens,
        "total_tokens": usage.prompt_tokens + usage.answer_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
