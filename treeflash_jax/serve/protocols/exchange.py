"""`Exchange`, the interface of a protocol: turns a body into a call, and pieces of answers into a response or events."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from fastapi import APIRouter
from pydantic import BaseModel

from treeflash_jax.core.error_text import clipped, warn
from treeflash_jax.serve.server_call import Delta, ServerCall, Usage

ERRORS = {401: "authentication_error", 429: "rate_limit_error"}  # OpenAI's types, by status
MOST_NOTES = 100  # lines of the log with texts that clients choose


class Event(NamedTuple):
    """A server-sent event. Without a name, it has data only."""

    data: dict[str, Any] | str
    name: str | None = None

    def encode(self) -> bytes:
        data = self.data if isinstance(self.data, str) else json.dumps(self.data, ensure_ascii=False)
        return (f"event: {self.name}\n" if self.name else "").encode() + f"data: {data}\n\n".encode()


@dataclass
class Served:
    """Facts about the server that protocols use.

    Attributes:
      name: name of the model in answers.
      created: time of the start, in seconds.
      memory: state that protocols keep between requests, by the class of the protocol.
      noted: lines that `note` logged.
    """

    name: str
    created: int
    memory: dict[type, Any] = field(default_factory=dict)
    noted: set[str] = field(default_factory=set)

    def note(self, texts: Iterable[str]) -> None:
        """Logs what is ignored in a request, each text once. After MOST_NOTES texts, it logs nothing.

        It takes no lock: threads that read requests at the same time may together log a few more.
        """
        for line in map(clipped, texts):
            if len(self.noted) >= MOST_NOTES:
                return
            if line not in self.noted:
                self.noted.add(line)
                warn(line)


class Exchange(ABC):
    """One request and its answers in the form of a protocol. It turns the body into a call, and pieces into events.

    A protocol is a subclass in `PROTOCOLS`.

    Attributes:
      path: path of its requests.
      body_kind: class with the fields of its requests; the server adds a field for each setting that is a number.
      counting_path: path of requests that count the tokens of a prompt; None if the protocol has none.
      counted_kind: class with the fields of requests to `counting_path`.
      id: id of this request in its answers.
    """

    path: ClassVar[str]
    body_kind: ClassVar[type[BaseModel]]
    counting_path: ClassVar[str | None] = None
    counted_kind: ClassVar[type[BaseModel]]
    id: str

    def __init__(self, body: Any, served: Served):
        self.body, self.served = body, served

    @abstractmethod
    def read_call(self) -> ServerCall:
        """Returns the call that the body describes. Raises ValueError for wrong or unsupported fields."""

    @abstractmethod
    def response(self, answers: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        """Returns the response with whole answers, each as one Delta."""

    @abstractmethod
    def begin(self, usage: Usage) -> Iterable[Event]:
        """Yields the first events of a stream. `usage` counts the prompts only."""

    @abstractmethod
    def add(self, delta: Delta) -> Iterable[Event]:
        """Yields the events of a new piece of an answer."""

    @abstractmethod
    def end(self, usage: Usage) -> Iterable[Event]:
        """Yields the last events of a stream."""

    def count(self, num_tokens: int) -> dict[str, Any]:
        """Returns the response to a request at `counting_path`."""
        raise NotImplementedError

    @classmethod
    def error(cls, status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
        """Returns the body of an error, by default in OpenAI's form.

        Args:
          param: name of the wrong field.
        """
        kind = ERRORS.get(status, "server_error" if status >= 500 else "invalid_request_error")
        return {"error": {"message": message, "type": kind, "param": param, "code": code}}

    @classmethod
    def add_routes(cls, router: APIRouter, served: Served) -> None:
        """Adds further routes of the protocol; by default, none."""
        return

    def failure(self, message: str) -> Event:
        """Returns the event that reports an error and ends a stream."""
        return Event(self.error(500, message))
