"""The process of `treeflash serve`: its port, its signals and its end."""

import asyncio
import ipaddress
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from treeflash_jax.core.checks import expect
from treeflash_jax.core.error_text import LONGEST_PATH, clipped
from treeflash_jax.engine.model import TreeFlash
from treeflash_jax.engine.settings.generate_config import GenerateConfig
from treeflash_jax.serve.app import make_app
from treeflash_jax.serve.limits import TimedProtocol
from treeflash_jax.serve.metrics import Metrics
from treeflash_jax.serve.options import ServeOptions
from treeflash_jax.serve.worker import Worker

SIGNALS = signal.SIGINT, signal.SIGTERM
KEEP_ALIVE = 75  # seconds; tools of an agent run between two requests, and a request on a closing connection fails
LAST_SECOND = 1  # part of the grace period that is kept for sending errors to unfinished answers, and for ending


def serve(load: Callable[[], TreeFlash], config: GenerateConfig, options: ServeOptions) -> int:
    """Serves a model until SIGTERM or Ctrl-C. All programs are compiled before it listens.

    Args:
      load: function that returns the model; called once the port is taken and the options are checked.

    Returns the exit status: 0 after SIGTERM, 130 after Ctrl-C, 1 if decoding ended. If something is unfinished after the
    grace period, it does not return: the process ends.
    """
    key = None if options.api_key_file is None else read_key(options.api_key_file)
    metrics = Metrics()
    listener = bind(options.host, options.port)
    hosts = allowed_hosts(options)
    model = load()
    if options.ui and model.tokenizer is None:
        raise ValueError("got --ui with a verifier without tokenizer.json, expected one that can chat")
    worker = Worker(model, config, metrics, options)
    worker.start()
    app = make_app(
        worker,
        metrics,
        key,
        hosts=hosts,
        has_page=options.ui,
        names=options.served_model_name,
        origins=options.allowed_origins,
    )
    server = Server(app, options.grace)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # lets the next server take the port after this one
    listener.listen()
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    for number in SIGNALS:
        signal.signal(number, server.handle_exit)
    name = app.state.answers.reader.served.name
    print(f"treeflash: serving {name} at http://{host}:{port}/v1", file=sys.stderr, flush=True)
    server.run(sockets=[listener])
    return server.finish()


def read_key(path: str) -> str:
    """Returns the content of --api-key-file. Raises ValueError if it cannot be read, is empty, or not ASCII."""
    try:
        key = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        got = f"got --api-key-file {clipped(path, LONGEST_PATH)} ({reason})"
        raise ValueError(f"{got}, expected a readable file with a key") from None
    expect(key != "" and key.isascii(), "content of --api-key-file", path, "a key of ASCII characters, as headers carry")
    return key


def allowed_hosts(options: ServeOptions) -> set[str] | None:
    """Returns the host names by which clients may call the server; None for any. Raises ValueError for names with ports."""
    try:
        is_local = options.host == "localhost" or ipaddress.ip_address(options.host).is_loopback
    except ValueError:  # another name
        is_local = False
    if not is_local and not options.allowed_hosts:
        return None
    return {"localhost", "127.0.0.1", "[::1]", *map(_host_name, (options.host, *options.allowed_hosts))}


def _host_name(host: str) -> str:
    """Returns a host name as clients send it in the header Host, without the port."""
    with suppress(ValueError):  # another name
        return f"[{ipaddress.IPv6Address(host.strip('[]'))}]"
    expect(":" not in host, "--allowed-hosts", host, "a name without scheme and port")
    return host.lower()


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket that holds the port, but refuses connections until it listens. Raises ValueError if it fails."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    reuse = socket.SOL_SOCKET, socket.SO_REUSEADDR
    listener.setsockopt(*reuse, 1)  # takes the port of a server that has just ended
    try:
        listener.bind((host, port))
        listener.setsockopt(*reuse, 0)  # no other process gets the port before this one listens
    except OSError as error:
        listener.close()
        expected = "an address of this machine and a free port; --port 0 takes one"
        raise ValueError(f"got --host {clipped(host, 60)} --port {port} ({error.strerror}), expected {expected}") from None
    return listener


class Server(uvicorn.Server):
    """uvicorn's server that also ends when decoding ends, within a grace period, or at once after a second signal."""

    def __init__(self, app: FastAPI, grace: int):
        timeouts: dict[str, Any] = {"timeout_keep_alive": KEEP_ALIVE, "timeout_graceful_shutdown": max(LAST_SECOND, grace)}
        super().__init__(uvicorn.Config(app, http=TimedProtocol, log_level="warning", lifespan="off", **timeouts))
        self._answers, self._grace = app.state.answers, grace
        self._signal: int | None = None
        self._end: float | None = None  # end of the grace period, in seconds of the monotonic clock

    def capture_signals(self) -> AbstractContextManager[None]:
        return nullcontext()  # the handlers of `serve` stay until the process ends

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        self._signal = sig
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        return self._answers.worker.error is not None or await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._end = time.monotonic() + max(LAST_SECOND, self._grace)
        seconds = 0 if self._answers.worker.error is not None else max(0, self._grace - LAST_SECOND)
        asyncio.get_running_loop().call_later(seconds, self._answers.end)
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # no traceback for each client that stopped reading
        await super().shutdown(sockets)

    def finish(self) -> int:
        """Ends the worker and returns the exit status. After the grace period, it ends the process instead."""
        answers, end = self._answers, self._end or 0.0
        has_ended = answers.worker.stop(max(0, end - time.monotonic()))
        if answers.num_unfinished:
            print(f"treeflash: ended with {answers.num_unfinished} requests unfinished", file=sys.stderr, flush=True)
        if answers.worker.error is not None:
            print(f"treeflash: error: decoding ended: {clipped(answers.worker.error)}", file=sys.stderr, flush=True)
            return 1
        if answers.num_unfinished or answers.num_busy or not has_ended:  # Python would wait for threads when it ends
            number = self._signal or signal.SIGTERM
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        return 130 if self._signal == signal.SIGINT else 0
