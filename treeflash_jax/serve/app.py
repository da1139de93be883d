"""Builds the FastAPI application: paths of protocols, models, health and metrics, the key check, and the form of errors."""

import hmac
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from fastapi import Request as HttpRequest
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from treeflash_jax.core.checks import WrongValue
from treeflash_jax.core.error_text import clipped, logger
from treeflash_jax.serve.call_reader import CallReader
from treeflash_jax.serve.http_answers import Gone, HttpAnswers, ServerEnds
from treeflash_jax.serve.limits import Limits
from treeflash_jax.serve.metrics import Metrics
from treeflash_jax.serve.page import add_page
from treeflash_jax.serve.protocols import PROTOCOLS, protocol_at
from treeflash_jax.serve.protocols.exchange import Exchange
from treeflash_jax.serve.protocols.fields import with_numbers
from treeflash_jax.serve.tokenizing import add_tokenizing
from treeflash_jax.serve.worker import QueueFull, Worker

SCHEMAS = "#/components/schemas/"


def make_app(
    worker: Worker,
    metrics: Metrics,
    key: str | None = None,
    *,
    hosts: Collection[str] | None = None,
    has_page: bool = False,
    names: Sequence[str] = (),
    origins: Sequence[str] = (),
) -> FastAPI:
    """Returns the application. Its `state.answers` is an `HttpAnswers`.

    If there is a key, clients must send it with every request, except for /health and the chat page.

    Args:
      hosts: host names by which clients may call the server; None for any.
      has_page: whether the server has the chat page, and draws trees of the last answers.
      names: accepted names of the model; answers contain the first. Default: see `CallReader`.
      origins: origins of other pages that may call the server from browsers (CORS), such as https://example.org, or "*".
    """
    app = FastAPI(title="treeflash serve", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Limits, metrics=metrics, hosts=hosts)
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    reader = CallReader(worker, int(metrics.started), tuple(names))
    answers = HttpAnswers(reader, keeps_latest=has_page)
    app.state.answers = answers
    needs = [Depends(make_key_check(key))]
    config = type(worker.request_maker.config)
    body_kinds = {protocol: with_numbers(protocol.body_kind, config) for protocol in PROTOCOLS}
    for protocol, body_kind in body_kinds.items():
        add_protocol(app, answers, protocol, body_kind, needs)
    add_tokenizing(app, reader, needs)
    add_models(app, reader, needs)
    add_monitoring(app, worker, metrics, needs)
    add_schema(app, body_kinds, needs)
    if has_page:
        add_page(app, needs, answers.latest, worker.model.tokenizer, answers.drawing)
    add_error_handlers(app)
    return app


def make_key_check(key: str | None) -> Callable[[HttpRequest], Awaitable[None]]:
    """Returns a check that raises HTTPException for a request without the key. If the key is None, it allows everything."""

    async def check(request: HttpRequest) -> None:
        if key is None:
            return
        sent_keys = [request.headers.get("x-api-key", "")]
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            sent_keys.append(bearer)
        if not any(hmac.compare_digest(sent.strip().encode(), key.encode()) for sent in sent_keys):
            message = "got no valid API key, expected 'Authorization: Bearer KEY'"
            raise HTTPException(401, {"message": message, "code": "invalid_api_key"})

    return check


def add_protocol(
    app: FastAPI, answers: HttpAnswers, protocol: type[Exchange], body_kind: type[BaseModel], needs: list[Any]
) -> None:
    @app.post(protocol.path, dependencies=needs, openapi_extra=describe(body_kind))
    async def answer(request: HttpRequest) -> Any:
        return await answers.answer(request, protocol, body_kind)

    router = APIRouter(dependencies=needs)
    protocol.add_routes(router, answers.reader.served)
    app.include_router(router)

    if protocol.counting_path is not None:

        @app.post(protocol.counting_path, dependencies=needs, openapi_extra=describe(protocol.counted_kind))
        async def count(request: HttpRequest) -> Any:
            return await answers.count(request, protocol)


def add_models(app: FastAPI, reader: CallReader, needs: list[Any]) -> None:
    """Adds the paths that list the model's names and describe each of them."""

    def make_card(name: str) -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": reader.served.created, "owned_by": "treeflash"}
        return card | {"max_model_len": reader.worker.request_maker.context}

    @app.get("/v1/models", dependencies=needs)
    async def list_models() -> Any:
        return {"object": "list", "data": [make_card(name) for name in reader.names]}

    @app.get("/v1/models/{name:path}", dependencies=needs)
    async def show_model(name: str) -> Any:
        reader.check_model(name)
        return make_card(name)


def add_monitoring(app: FastAPI, worker: Worker, metrics: Metrics, needs: list[Any]) -> None:
    """Adds the paths of the server's health, which needs no key, and of its metrics."""

    @app.get("/health")
    async def report_health() -> Any:
        if worker.error is not None:
            return JSONResponse({"status": "decoding ended"}, 503)
        return {"status": "ok"}

    @app.get("/metrics", dependencies=needs)
    async def show_metrics() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)


def add_schema(app: FastAPI, body_kinds: Mapping[type[Exchange], type[BaseModel]], needs: list[Any]) -> None:
    """Adds the OpenAPI schema, with the bodies of all protocols."""

    @app.get("/openapi.json", dependencies=needs, include_in_schema=False)
    async def show_schema() -> Any:
        counted = [protocol.counted_kind for protocol in body_kinds if protocol.counting_path is not None]
        kinds = [(body, "validation") for body in [*body_kinds.values(), *counted]]
        definitions = models_json_schema(kinds, ref_template=SCHEMAS + "{model}")[1]["$defs"]
        return app.openapi() | {"components": {"schemas": definitions}}


def describe(body_kind: type[BaseModel]) -> dict[str, Any]:
    """Returns the part of an operation's OpenAPI description that names its kind of body."""
    schema = {"schema": {"$ref": SCHEMAS + body_kind.__name__}}
    return {"requestBody": {"content": {"application/json": schema}}}


def add_error_handlers(app: FastAPI) -> None:
    """Gives errors the form of the requested path's protocol, by default OpenAI's. Messages are those of the exceptions."""

    def respond(
        request: HttpRequest, status: int, message: str, headers: dict[str, str] | None = None, **more: Any
    ) -> Response:
        protocol = protocol_at(request.url.path)
        return JSONResponse(protocol.error(status, message, **more), status, headers)

    @app.exception_handler(ValueError)
    async def refuse(request: HttpRequest, reason: ValueError) -> Response:
        logger.debug("refused a request", exc_info=reason)  # shows a bug that looks like a refusal
        param = None
        if isinstance(reason, WrongValue) and reason.name.replace(".", "_").isidentifier():
            param = reason.name
        return respond(request, 400, clipped(reason), param=param)

    @app.exception_handler(ValidationError)
    async def refuse_body(request: HttpRequest, reason: ValidationError) -> Response:
        first_error = reason.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(str(part) for part in first_error["loc"])
        return respond(request, 400, clipped(f"{field or 'body'}: {first_error['msg']}"), param=clipped(field, 60) or None)

    @app.exception_handler(QueueFull)
    async def refuse_for_now(request: HttpRequest, reason: QueueFull) -> Response:
        return respond(request, 429, str(reason), {"retry-after": "1"}, code="queue_full")

    @app.exception_handler(HTTPException)
    async def refuse_otherwise(request: HttpRequest, reason: HTTPException) -> Response:
        detail = reason.detail if isinstance(reason.detail, dict) else {"message": clipped(reason.detail)}
        return respond(request, reason.status_code, **detail)

    @app.exception_handler(RuntimeError)
    async def fail(request: HttpRequest, reason: RuntimeError) -> Response:
        return respond(request, 503 if isinstance(reason, ServerEnds) else 500, clipped(reason))

    @app.exception_handler(Exception)  # Starlette raises it again after the response, and uvicorn logs it
    async def fail_unexpectedly(request: HttpRequest, reason: Exception) -> Response:
        return respond(request, 500, f"the request failed ({type(reason).__name__}); see the server's log")

    @app.exception_handler(Gone)
    @app.exception_handler(ClientDisconnect)
    async def drop(_: HttpRequest, __: Exception) -> Response:
        return Response(status_code=499)  # never received, because the connection is closed
