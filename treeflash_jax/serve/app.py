"""The HTTP server: OpenAI's API, the state of the server, and its metrics."""

import asyncio
import hmac
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from treeflash_jax.core.checks import clipped, expect
from treeflash_jax.engine.generate_config import GenerateConfig
from treeflash_jax.engine.model import TreeFlash
from treeflash_jax.engine.results import Result
from treeflash_jax.serve.api_forms import (
    Body,
    ChatBody,
    ChatForm,
    CompletionBody,
    CompletionForm,
    Form,
    count_usage,
    make_error,
)
from treeflash_jax.serve.metrics import Metrics
from treeflash_jax.serve.options import ServeOptions
from treeflash_jax.serve.worker import Piece, QueueFull, Submission, Worker

MOST_BYTES = 4 * 2**20  # of a body
KEPT_ANSWERS = 64  # whose trees the chat page can show


def serve(model: TreeFlash, config: GenerateConfig, options: ServeOptions) -> int:
    """Serves a model until SIGTERM or Ctrl-C; compiles all programs before it listens."""
    key = None if options.api_key_file is None else Path(options.api_key_file).read_text(encoding="utf-8").strip()
    expect(key != "", "content of --api-key-file", options.api_key_file, "a key, not an empty file")
    metrics = Metrics()
    listener = bind(options.host, options.port)
    worker = Worker(model, config, metrics, options)
    worker.start()
    settings = {"log_level": "warning", "lifespan": "off", "timeout_graceful_shutdown": options.grace}
    server = uvicorn.Server(uvicorn.Config(make_app(worker, metrics, key, has_page=options.ui), **settings))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn raises it again after the last answer
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # for the next server, once this one has ended
    listener.listen()
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    print(f"treeflash: serving {worker.model.names[0]} at http://{host}:{port}/v1", file=sys.stderr, flush=True)
    try:
        server.run(sockets=[listener])
    finally:
        worker.stop()
    return 0


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket that has its port, but refuses connections until it listens. Raises ValueError if it cannot."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    reuse = socket.SOL_SOCKET, socket.SO_REUSEADDR
    listener.setsockopt(*reuse, 1)  # the port of a server that has just ended
    try:
        listener.bind((host, port))
        listener.setsockopt(*reuse, 0)  # nobody else gets it before this one listens
    except OSError as error:
        listener.close()
        known = "an address of this machine and a free port; --port 0 takes one"
        raise ValueError(f"got --host {clipped(host, 60)} --port {port} ({error.strerror}), expected {known}") from None
    return listener


def make_app(worker: Worker, metrics: Metrics, key: str | None = None, *, has_page: bool = False) -> FastAPI:
    """Returns the application; with a key, clients must send it.

    Args:
      has_page: whether it serves the chat page, and trees of the last answers.
    """
    app = FastAPI(title="treeflash serve", docs_url=None, redoc_url=None)
    app.add_middleware(Limits, metrics=metrics)
    answering = Answering(worker, keeps_latest=has_page)

    async def check_key(request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        is_key = hmac.compare_digest(given.strip().encode(), (key or "").encode())
        if key is not None and not (is_key and scheme.lower() == "bearer"):
            raise HTTPException(
                401, make_error("got no valid API key, expected 'Authorization: Bearer KEY'", code="invalid_api_key")
            )

    @app.post("/v1/chat/completions", dependencies=[Depends(check_key)])
    async def chat(body: ChatBody, request: Request) -> Any:
        return await answering.answer(body, request, ChatForm)

    @app.post("/v1/completions", dependencies=[Depends(check_key)])
    async def complete(body: CompletionBody, request: Request) -> Any:
        return await answering.answer(body, request, CompletionForm)

    @app.get("/v1/models", dependencies=[Depends(check_key)])
    async def list_models() -> Any:
        created = int(metrics.started)
        card = {"id": worker.model.names[0], "object": "model", "created": created, "owned_by": "treeflash"}
        return {"object": "list", "data": [card | {"max_model_len": worker.context}]}

    @app.get("/health")
    async def report_health() -> Any:
        if worker.error is not None:
            return JSONResponse({"status": "decoding ended"}, 503)
        return {"status": "ok"}

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    if has_page:
        add_page(app, answering.latest, [Depends(check_key)])
    add_error_handlers(app)
    return app


class Answering:
    """Turns HTTP requests into submissions to a worker, and their results into responses.

    Attributes:
      latest: the last answers, whose trees the page may ask for, by id of the request; empty without `keeps_latest`.
    """

    def __init__(self, worker: Worker, *, keeps_latest: bool):
        self.worker, self.keeps_latest = worker, keeps_latest
        self.latest: dict[str, dict[int, Result]] = {}
        self._encoding = asyncio.Lock()  # tokenizers are not safe in several threads

    async def answer(self, body: Body, request: Request, form_kind: type[Form]) -> Response:
        worker, name = self.worker, self.worker.model.names[0]
        if body.model not in (None, name):
            known = f"got model {clipped(body.model, 60)!r}, expected {name!r}"
            raise HTTPException(404, make_error(known, code="model_not_found"))
        if worker.error is not None:
            raise HTTPException(503, make_error("decoding ended; see the server's log", "server_error"))
        form = form_kind(name, worker.model.tokenizer, body)
        async with self._encoding:
            prompts = await run_in_threadpool(self.encode, body)
        requests = await run_in_threadpool(worker.make_requests, prompts, **body.settings())
        submission = Submission(requests, streams=bool(body.stream))
        worker.submit(submission)
        results: dict[int, Result] = {}
        if self.keeps_latest:
            self.latest[form.id] = results
            if len(self.latest) > KEPT_ANSWERS:
                del self.latest[next(iter(self.latest))]
        watcher = asyncio.create_task(wait_until_gone(request))
        watcher.add_done_callback(lambda _: worker.cancel(submission))
        if body.stream:
            events = stream(submission, form, results, len(prompts), body.includes_usage)
            return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        async for piece in pieces(submission):
            results[piece.index] = piece.result
        if len(results) < len(requests):
            return Response(status_code=499)  # the client is gone
        return JSONResponse(form.whole([results[index] for index in range(len(results))], len(prompts)))

    def encode(self, body: Body) -> list[list[int]]:
        prompts = [self.worker.model.encode(prompt) for prompt in body.prompts()]
        if not prompts:
            raise ValueError("got no prompts, expected at least one")
        return prompts


def add_page(app: FastAPI, latest: dict[str, dict[int, Result]], needs: list[Any]) -> None:
    """Adds the chat page, and the trees of the latest answers."""
    page = resources.files("treeflash_jax.serve").joinpath("page.html").read_text(encoding="utf-8")

    @app.get("/", include_in_schema=False)
    async def show_page() -> Response:
        return HTMLResponse(page)

    @app.get("/ui/trees/{answer_id}", dependencies=needs, include_in_schema=False)
    async def draw_tree(answer_id: str) -> Any:
        result = latest.get(answer_id, {}).get(0)
        if result is None:
            known = f"got answer {clipped(answer_id, 60)!r}, expected one of the last {KEPT_ANSWERS}"
            raise HTTPException(404, make_error(known))
        lengths = result.accept_lengths or [0]
        best = lengths.index(max(lengths))
        tree = await run_in_threadpool(result.tree, best)
        return {"round": best, "text": str(tree)}


def add_error_handlers(app: FastAPI) -> None:
    """Gives errors the form of OpenAI's API; the message is the line that Python gets."""

    @app.exception_handler(ValueError)
    async def refuse(_: Request, reason: ValueError) -> Response:
        return JSONResponse(make_error(clipped(reason)), 400)

    @app.exception_handler(RequestValidationError)
    async def refuse_body(_: Request, reason: RequestValidationError) -> Response:
        first = reason.errors()[0]
        place = ".".join(str(part) for part in first["loc"][1:]) or "body"
        return JSONResponse(make_error(clipped(f"{place}: {first['msg']}")), 400)

    @app.exception_handler(QueueFull)
    async def refuse_for_now(_: Request, reason: QueueFull) -> Response:
        return JSONResponse(make_error(str(reason), "rate_limit_error", "queue_full"), 429, {"retry-after": "1"})

    @app.exception_handler(HTTPException)
    async def refuse_otherwise(_: Request, reason: HTTPException) -> Response:
        is_ours = isinstance(reason.detail, dict)
        return JSONResponse(reason.detail if is_ours else make_error(clipped(reason.detail)), reason.status_code)

    @app.exception_handler(RuntimeError)
    async def fail(_: Request, reason: RuntimeError) -> Response:
        return JSONResponse(make_error(clipped(reason), "server_error"), 500)


async def wait_until_gone(request: Request) -> None:
    """Waits until the client is gone, or has its whole answer."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def pieces(submission: Submission) -> AsyncIterator[Piece]:
    """Yields the pieces of all answers of a submission; ends early if it is cancelled. Raises what decoding raised."""
    unfinished = len(submission.requests)
    while unfinished:
        piece = await submission.pieces.get()
        if piece is None:
            return
        if isinstance(piece, Exception):
            raise piece
        unfinished -= piece.is_last
        yield piece


async def stream(
    submission: Submission, form: Form, results: dict[int, Result], num_prompts: int, includes_usage: bool
) -> AsyncIterator[str]:
    """Yields server-sent events: the chunks of all answers, their usage if `includes_usage`, and [DONE].

    Args:
      results: filled with the answers so far.
    """
    show = partial(_event, {"usage": None} if includes_usage else {})
    try:
        async for piece in pieces(submission):
            if piece.index not in results:
                for chunk in form.begin(piece.index):
                    yield show(chunk)
            results[piece.index] = piece.result
            if piece.chunk.ids or piece.is_last:
                yield show(form.piece(piece))
    except RuntimeError as reason:
        yield show(make_error(clipped(reason), "server_error"))
        return
    if includes_usage:
        total = count_usage([results[index] for index in sorted(results)], num_prompts)
        yield _event({"usage": total}, form.make_object(form.chunk_kind, []))
    yield "data: [DONE]\n\n"


def _event(more: dict[str, Any], data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data | more, ensure_ascii=False)}\n\n"


class Limits:
    """Middleware that refuses long bodies and counts requests."""

    def __init__(self, app: Any, metrics: Metrics):
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        size = 0

        async def receive_limited() -> Any:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > MOST_BYTES:
                raise HTTPException(413, make_error(f"got a body of over {MOST_BYTES:,} bytes, expected a shorter one"))
            return message

        async def send_counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")  # of an unknown path there is none
                self.metrics.requests.labels(getattr(route, "path", "other"), message["status"]).inc()
            await send(message)

        await self.app(scope, receive_limited, send_counted)
