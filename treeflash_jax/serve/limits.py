"""Limits that refuse requests before any work is done: their bodies, their headers, and the time to send them."""

import asyncio
import re
from collections.abc import Collection
from typing import Any, TypeVar

import h11
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from treeflash_jax.core.error_text import clipped
from treeflash_jax.serve.metrics import Metrics
from treeflash_jax.serve.protocols import protocol_at

MOST_BODY_BYTES = 4 * 2**20
MOST_BRACKETS = 2**16  # number of brackets in a body, outside of its longest text
REQUEST_SECONDS = {h11.IDLE: 10, h11.SEND_BODY: 30}  # for the headers of a request, and for its body
B = TypeVar("B", bound=BaseModel)


class TimedProtocol(H11Protocol):
    """HTTP/1.1 with time limits for the headers and the body of a request. Slower clients are disconnected."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._timed: Any = None  # state of h11 for which the timer was set; a key of REQUEST_SECONDS has a limit
        self._timer: asyncio.TimerHandle | None = None
        self._set_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._set_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _set_timer(self) -> None:
        state = self.conn.their_state
        if state is self._timed:  # further bytes do not extend the time
            return
        self._stop_timer()
        self._timed = state
        if state in REQUEST_SECONDS:
            self._timer = self.loop.call_later(REQUEST_SECONDS[state], self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class Limits:
    """Middleware that refuses other hosts, ambiguous lengths and long bodies, and counts requests.

    Args:
      hosts: host names by which clients may call the server, without ports; None allows all. Browsers send the host name
        of the page, so this refuses a foreign page whose name was redirected to this machine (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, hosts: Collection[str] | None):
        self.app, self.metrics, self.hosts = app, metrics, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = 0

        async def receive_limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > MOST_BODY_BYTES:
                raise HTTPException(413, f"got a body of over {MOST_BODY_BYTES:,} bytes, expected a shorter one")
            return message

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")  # None for an unknown path
                self.metrics.requests.labels(getattr(route, "path", "other"), message["status"]).inc()
            await send(message)

        refusal = self._refusal(scope["path"], dict(scope["headers"]))
        await (refusal or self.app)(scope, receive_limited, send_counted)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> JSONResponse | None:
        error = protocol_at(path).error
        host = re.sub(r":\d*$", "", headers.get(b"host", b"").decode("latin-1").lower())
        if host and self.hosts is not None and host not in self.hosts:
            names = ", ".join(sorted(self.hosts))
            message = f"got Host {clipped(host, 60)!r}, expected one of {names} (see --allowed-hosts)"
            return JSONResponse(error(403, message), 403)
        if b"transfer-encoding" in headers and b"content-length" in headers:  # a proxy may obey the other header
            message = "got Content-Length beside Transfer-Encoding, expected one of them"
            return JSONResponse(error(400, message), 400, {"connection": "close"})
        return None


def parse_body(kind: type[B], content_type: str, data: bytes, most_text: int) -> B:
    """Parses the JSON of a request.

    Args:
      most_text: number of bytes of the longest text that can fit the context.

    Raises ValueError for a wrong body, and for more brackets than a body with such a text can have: Python would take
    seconds to make millions of lists, while every thread waits.
    """
    if not re.match(r"application/json\b", content_type, flags=re.IGNORECASE):  # pages of other sites can't send this type
        raise ValueError(f"got content-type {clipped(content_type, 60)!r}, expected application/json")
    brackets = data.count(b"[") + data.count(b"{")
    if brackets > most_text + MOST_BRACKETS:
        raise ValueError(f"got a body with {brackets:,} brackets, expected at most {most_text + MOST_BRACKETS:,}")
    return kind.model_validate_json(data)
