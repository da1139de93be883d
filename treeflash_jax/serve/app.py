"""The HTTP server: OpenAI's API, the state of the server, and its metrics."""

import asyncio
import hmac
import json
import logging
from collections.abc import AsyncIterator, Collection
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import ValidationError
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from treeflash_jax.core.checks import clipped
from treeflash_jax.engine.answers.results import Result
from treeflash_jax.serve.api_forms import (
    Body,
    ChatBody,
    ChatForm,
    CompletionBody,
    CompletionForm,
    Form,
    count_usage,
    make_error,
    with_numbers,
)
from treeflash_jax.serve.limits import MOST_BYTES, Limits, parse_body
from treeflash_jax.serve.metrics import Metrics
from treeflash_jax.serve.page import KEPT_ANSWERS, add_page
from treeflash_jax.serve.threads import Compiler, Threads
from treeflash_jax.serve.worker import Piece, QueueFull, Submission, Worker

READING, WRITING, COMPILING = 8, 4, 2  # threads for bodies, for whole answers, and for schemas, of up to 2 GiB each
SCHEMAS = "#/components/schemas/"
logger = logging.getLogger("treeflash_jax")


class Gone(Exception):
    """The client went away."""


class ServerEnds(RuntimeError):
    """The server ends before the answer."""


def make_app(
    worker: Worker,
    metrics: Metrics,
    key: str | None = None,
    *,
    hosts: Collection[str] | None = None,
    has_page: bool = False,
) -> FastAPI:
    """Returns the application, whose `state.answering` is its `Answering`.

    With a key, clients must send it for everything but /health and the chat page.

    Args:
      hosts: names by which clients may call the server; None for any.
      has_page: whether it serves the chat page, and trees of the last answers.
    """
    app = FastAPI(title="treeflash serve", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Limits, metrics=metrics, hosts=hosts)
    answering = app.state.answering = Answering(worker, keeps_latest=has_page)

    async def check_key(request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        is_key = hmac.compare_digest(given.strip().encode(), (key or "").encode())
        if key is not None and not (is_key and scheme.lower() == "bearer"):
            raise HTTPException(
                401, make_error("got no valid API key, expected 'Authorization: Bearer KEY'", code="invalid_api_key")
            )

    needs = [Depends(check_key)]
    bodies = [with_numbers(kind, type(worker.config)) for kind in (ChatBody, CompletionBody)]
    schemas = [{"schema": {"$ref": SCHEMAS + kind.__name__}} for kind in bodies]
    extra = [{"requestBody": {"content": {"application/json": schema}}} for schema in schemas]

    @app.post("/v1/chat/completions", dependencies=needs, openapi_extra=extra[0])
    async def chat(request: Request) -> Any:
        return await answering.answer(request, bodies[0], ChatForm)

    @app.post("/v1/completions", dependencies=needs, openapi_extra=extra[1])
    async def complete(request: Request) -> Any:
        return await answering.answer(request, bodies[1], CompletionForm)

    @app.get("/v1/models", dependencies=needs)
    async def list_models() -> Any:
        created = int(metrics.started)
        card = {"id": answering.name, "object": "model", "created": created, "owned_by": "treeflash"}
        return {"object": "list", "data": [card | {"max_model_len": worker.context}]}

    @app.get("/health")
    async def report_health() -> Any:
        if worker.error is not None:
            return JSONResponse({"status": "decoding ended"}, 503)
        return {"status": "ok"}

    @app.get("/openapi.json", dependencies=needs, include_in_schema=False)
    async def show_api() -> Any:
        kinds = [(kind, "validation") for kind in bodies]
        definitions = models_json_schema(kinds, ref_template=SCHEMAS + "{model}")[1]["$defs"]
        return app.openapi() | {"components": {"schemas": definitions}}

    @app.get("/metrics", dependencies=needs)
    async def show_metrics() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    if has_page:
        add_page(app, needs, answering.latest, worker.model.tokenizer, answering.writing)
    add_error_handlers(app)
    return app


class Answering:
    """Turns HTTP requests into submissions to a worker, and their results into responses.

    Attributes:
      name: id of the model: what was given as verifier; of a path, its last part.
      latest: the last answers, whose trees the page may ask for, by id of the request; empty without `keeps_latest`.
      num_unfinished: number of requests that `end` found unfinished.
    """

    def __init__(self, worker: Worker, *, keeps_latest: bool):
        self.worker, self.keeps_latest = worker, keeps_latest
        given = worker.model.names[0]
        self.name = Path(given).resolve().name if Path(given).exists() else given
        self.latest: dict[str, dict[int, Result]] = {}
        self.reading, self.writing = Threads(READING), Threads(WRITING)
        self.compiler = Compiler(worker.compile, COMPILING)
        self.num_unfinished = 0
        self._has_ended = False
        self._preparing: set[asyncio.Task] = set()
        self._submissions: set[Submission] = set()

    @property
    def num_busy(self) -> int:
        """Number of threads that run."""
        return self.reading.busy + self.writing.busy + self.compiler.threads.busy

    def end(self) -> None:
        """Ends all answers with an error, and refuses new ones."""
        self._has_ended = True
        self.num_unfinished = len(self._preparing) + len(self._submissions)
        for task in self._preparing:
            task.cancel()
        for submission in self._submissions:
            submission.pieces.put_nowait(ServerEnds("the server ends"))
            self.worker.cancel(submission)

    async def answer(self, request: Request, kind: type[Body], form_kind: type[Form]) -> Response:
        if self.worker.error is not None:
            raise HTTPException(503, make_error("decoding ended; see the server's log", "server_error"))
        data = await request.body()
        preparing = asyncio.create_task(self.prepare(data, request.headers.get("content-type", ""), kind, form_kind))
        self._preparing.add(preparing)
        gone = asyncio.create_task(wait_until_gone(request))
        gone.add_done_callback(lambda _: preparing.cancel())
        try:
            body, form, submission, num_prompts = await preparing
        except asyncio.CancelledError:
            raise ServerEnds("the server ends") if self._has_ended else Gone from None
        finally:
            self._preparing.discard(preparing)
        self._submissions.add(submission)
        gone.add_done_callback(lambda _: self.drop(submission))
        results: dict[int, Result] = {}
        if self.keeps_latest:
            self.latest[form.id] = results
            if len(self.latest) > KEPT_ANSWERS:
                del self.latest[next(iter(self.latest))]
        if body.stream:
            events = stream(submission, form, results, num_prompts, body.includes_usage)
            return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        try:
            async for piece in pieces(submission):
                results[piece.index] = piece.result
            ordered = [results[index] for index in range(len(results))]
            return await self.writing.run(lambda: JSONResponse(form.whole(ordered, num_prompts)))
        except Exception as reason:
            raise _failure(reason) from None

    async def prepare(
        self, data: bytes, content_type: str, kind: type[Body], form_kind: type[Form]
    ) -> tuple[Body, Form, Submission, int]:
        """Returns a parsed body, the form of its answers, their submission, and the number of prompts.

        Raises ValueError, HTTPException and QueueFull: by counts, then sizes, then tokens.
        """
        worker, run, name = self.worker, self.reading.run, self.name
        if self._has_ended:
            raise ServerEnds("the server ends")
        limit = worker.text_limit
        most_text = MOST_BYTES if limit is None or limit.most_bytes is None else limit.most_bytes
        body = await run(lambda: parse_body(kind, content_type, data, most_text))
        if body.model not in (None, name, worker.model.names[0]):
            known = f"got model {clipped(body.model, 60)!r}, expected {name!r}"
            raise HTTPException(404, make_error(known, code="model_not_found"))
        settings = body.settings()
        worker.check_room(body.num_answers)
        form = form_kind(name, worker.model.tokenizer, body)
        prompts = await run(lambda: worker.encode(body.prompts()))
        for constraint in worker.find_constraints(prompts, settings):
            await self.compiler.compile(constraint)
        requests = await run(lambda: worker.make_requests(prompts, **settings))
        submission = Submission(requests, streams=bool(body.stream))
        worker.submit(submission)
        return body, form, submission, len(prompts)

    def drop(self, submission: Submission) -> None:
        """Forgets a submission whose client is gone, or has its whole answer."""
        self._submissions.discard(submission)
        self.worker.cancel(submission)


def add_error_handlers(app: FastAPI) -> None:
    """Gives errors the form of OpenAI's API; the message is the line that Python gets."""

    @app.exception_handler(ValueError)
    async def refuse(_: Request, reason: ValueError) -> Response:
        return JSONResponse(make_error(clipped(reason)), 400)

    @app.exception_handler(ValidationError)
    async def refuse_body(_: Request, reason: ValidationError) -> Response:
        first = reason.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "body"
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
        return JSONResponse(make_error(clipped(reason), "server_error"), 503 if isinstance(reason, ServerEnds) else 500)

    @app.exception_handler(Gone)
    @app.exception_handler(ClientDisconnect)
    async def drop(_: Request, __: Exception) -> Response:
        return Response(status_code=499)  # which nobody reads


async def wait_until_gone(request: Request) -> None:
    """Waits until the client is gone, or has its whole answer."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def pieces(submission: Submission) -> AsyncIterator[Piece]:
    """Yields the pieces of all answers of a submission. Raises Gone if it is cancelled, and what decoding raised."""
    unfinished = len(submission.requests)
    while unfinished:
        piece = await submission.pieces.get()
        if piece is None:
            raise Gone
        if isinstance(piece, Exception):
            raise piece
        unfinished -= piece.is_last
        yield piece


async def stream(
    submission: Submission, form: Form, results: dict[int, Result], num_prompts: int, includes_usage: bool
) -> AsyncIterator[bytes]:
    """Yields server-sent events: the chunks of all answers, their usage if `includes_usage`, and [DONE] or an error.

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
        if includes_usage:
            total = count_usage([results[index] for index in sorted(results)], num_prompts)
            yield _event({"usage": total}, form.make_object(form.chunk_kind, []))
        yield b"data: [DONE]\n\n"
    except Exception as reason:
        yield show(make_error(clipped(_failure(reason)), "server_error"))


def _failure(reason: Exception) -> Exception:
    """Returns the error that a client gets for a failure during its answer: never that its request is wrong."""
    if isinstance(reason, RuntimeError | Gone):
        return reason
    logger.error("an answer could not be written", exc_info=reason)
    return RuntimeError(f"the answer could not be written ({type(reason).__name__})")


def _event(more: dict[str, Any], data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data | more, ensure_ascii=False)}\n\n".encode()
