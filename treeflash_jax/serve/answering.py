"""Answers to HTTP requests: a request becomes a submission to the worker, its pieces a response or a stream."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from treeflash_jax.core.checks import WrongValue, clipped, warn
from treeflash_jax.engine.answers.results import Chunk, Result
from treeflash_jax.serve.answer_reader import AnswerReader
from treeflash_jax.serve.call import ServerCall, Usage
from treeflash_jax.serve.limits import MOST_BYTES, parse_body
from treeflash_jax.serve.model_calls import model_prompts, model_settings
from treeflash_jax.serve.page import KEPT_ANSWERS
from treeflash_jax.serve.protocols.exchange import Exchange, Served
from treeflash_jax.serve.threads import Compiler, Threads
from treeflash_jax.serve.worker import Piece, Submission, Worker

READING, WRITING, COMPILING = 8, 4, 2  # threads for bodies, for whole answers, and for schemas, of up to 2 GiB each
MOST_IGNORED = 100  # fields that the log names
logger = logging.getLogger("treeflash_jax")
B = TypeVar("B", bound=BaseModel)


class Gone(Exception):
    """The client went away."""


class ServerEnds(RuntimeError):
    """The server ends before the answer."""


class Answering:
    """Turns HTTP requests into submissions to a worker, and their results into responses.

    Attributes:
      names: names of the model, of which answers have the first: those given, or else what was given as verifier; of a
        path, its last part.
      latest: the last answers, whose trees the page may ask for, by id of the request; empty without `keeps_latest`.
      num_unfinished: number of requests that `end` found unfinished.
    """

    def __init__(self, worker: Worker, created: int, *, names: tuple[str, ...] = (), keeps_latest: bool = False):
        self.worker, self.keeps_latest = worker, keeps_latest
        given = worker.model.names[0]
        self.names = names or (Path(given).resolve().name if Path(given).exists() else given,)
        self.served = Served(self.names[0], created)
        self.latest: dict[str, dict[int, Result]] = {}
        self.reading, self.writing = Threads(READING), Threads(WRITING)
        self.compiler = Compiler(worker.compile, COMPILING)
        self.num_unfinished = 0
        self._has_ended = False
        self._ignored: set[str] = set()
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

    async def answer(self, request: Request, kind: type[Exchange]) -> Response:
        """Returns the response to a request in the form of a protocol. Raises as `prepare`, and Gone."""
        if self.worker.error is not None:
            raise HTTPException(503, "decoding ended; see the server's log")
        data = await request.body()
        preparing = asyncio.create_task(self.prepare(data, request.headers.get("content-type", ""), kind))
        self._preparing.add(preparing)
        gone = asyncio.create_task(wait_until_gone(request))
        gone.add_done_callback(lambda _: preparing.cancel())
        try:
            exchange, call, submission, num_tokens = await preparing
        except asyncio.CancelledError:
            raise ServerEnds("the server ends") if self._has_ended else Gone from None
        finally:
            self._preparing.discard(preparing)
        self._submissions.add(submission)
        gone.add_done_callback(lambda _: self.drop(submission))
        results: dict[int, Result] = {}
        if self.keeps_latest:
            self.latest[exchange.id] = results
            if len(self.latest) > KEPT_ANSWERS:
                del self.latest[next(iter(self.latest))]
        reader = AnswerReader(call, self.worker.model.tokenizer)
        if call.streams:
            events = stream(submission, exchange, reader, results, len(call.prompts), num_tokens, self.writing)
            return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        try:
            async for piece in pieces(submission):
                results[piece.index] = piece.result
            ordered = [results[index] for index in range(len(results))]
            write = partial(_write, exchange, reader, ordered, len(call.prompts))
            return await self.writing.run(write)
        except Exception as reason:
            raise _failure(reason) from None

    async def count(self, request: Request, kind: type[Exchange]) -> Response:
        """Returns the response to a request for the number of a prompt's tokens. Raises ValueError and HTTPException."""
        data = await request.body()
        exchange, call = await self.read(data, request.headers.get("content-type", ""), kind, kind.counted_kind)
        return JSONResponse(exchange.count(sum(map(len, await self.encode(call)))))

    async def prepare(
        self, data: bytes, content_type: str, kind: type[Exchange]
    ) -> tuple[Exchange, ServerCall, Submission, int]:
        """Returns the exchange of a parsed body, its call, the submission of that, and the number of prompt tokens.

        Raises ValueError, HTTPException and QueueFull: by counts, then sizes, then tokens.
        """
        worker = self.worker
        if self._has_ended:
            raise ServerEnds("the server ends")
        exchange, call = await self.read(data, content_type, kind, kind.body_kind)
        worker.check_room(call.num_answers)
        try:
            prompts = await self.encode(call)
            settings = model_settings(call, worker.model.tokenizer, prompts)
            if call.ends_with_context:
                room = max(1, worker.context - max(map(len, prompts)))
                settings = settings | {"max_new_tokens": min(settings["max_new_tokens"], room)}
            for constraint in worker.find_constraints(prompts, settings):
                await self.compiler.compile(constraint)
            requests = await self.reading.run(lambda: worker.numbered_requests(prompts, **settings))
        except ValueError as error:
            made = {} if "structural_tag" in call.settings else {"structural_tag": "tools"}
            raise _as_sent(error, call.sent_names | made) from None
        submission = Submission(requests, streams=call.streams)
        worker.submit(submission)
        return exchange, call, submission, sum(map(len, prompts))

    async def parse(self, data: bytes, content_type: str, kind: type[B]) -> B:
        """Returns the parsed body of a request for this model. Raises ValueError and HTTPException."""
        limit = self.worker.text_limit
        most_text = MOST_BYTES if limit is None or limit.most_bytes is None else limit.most_bytes
        body = await self.reading.run(lambda: parse_body(kind, content_type, data, most_text))
        self.check_model(body.model)
        return body

    async def read(
        self, data: bytes, content_type: str, kind: type[Exchange], body_kind: type[BaseModel]
    ) -> tuple[Exchange, ServerCall]:
        """Returns the exchange of a body and its call. Raises ValueError and HTTPException."""
        body = await self.parse(data, content_type, body_kind)
        exchange = kind(body, self.served)
        call = await self.reading.run(exchange.call)
        self.note_ignored(kind, body)
        call.tools.check()
        return exchange, call

    async def encode(self, call: ServerCall) -> list[list[int]]:
        """Returns the ids of a call's prompts. Raises ValueError."""
        worker = self.worker
        return await self.reading.run(lambda: worker.encode(model_prompts(call, worker.model.tokenizer)))

    def check_model(self, name: str | None) -> None:
        """Raises HTTPException for a name of another model."""
        if name not in (None, *self.names, self.worker.model.names[0]):
            known = f"got model {clipped(name, 60)!r}, expected {self.names[0]!r}"
            raise HTTPException(404, {"message": known, "param": "model", "code": "model_not_found"})

    def note_ignored(self, kind: type[Exchange], body: Any) -> None:
        """Logs the fields of a body that are ignored, each once."""
        for name in (body.model_extra or {}).keys() - self._ignored:
            if len(self._ignored) < MOST_IGNORED:
                self._ignored.add(name)
                warn(f"{kind.path}: field {clipped(name, 60)!r} is ignored")

    def drop(self, submission: Submission) -> None:
        """Forgets a submission whose client is gone, or has its whole answer."""
        self._submissions.discard(submission)
        self.worker.cancel(submission)


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


def _write(exchange: Exchange, reader: AnswerReader, results: list[Result], num_prompts: int) -> Response:
    """Returns the response with whole answers."""
    answers = []
    for index, result in enumerate(results):
        chunk = Chunk(ids=result.ids, text=result.text, rounds=len(result.accept_lengths))
        answers.append(reader.read(Piece(index, chunk, result, True)))
    return JSONResponse(exchange.whole(answers, Usage.count(results, num_prompts)))


async def stream(
    submission: Submission,
    exchange: Exchange,
    reader: AnswerReader,
    results: dict[int, Result],
    num_prompts: int,
    num_tokens: int,
    writing: Threads,
) -> AsyncIterator[bytes]:
    """Yields the events of all answers of a submission, or at their end an error.

    Args:
      results: filled with the answers so far.
      num_tokens: number of tokens of the prompts.
      writing: threads that read echoed prompts, which would hold up the event loop.
    """
    try:
        for event in exchange.begin(Usage(num_tokens, 0, 0)):
            yield event.encode()
        async for piece in pieces(submission):
            results[piece.index] = piece.result
            read = partial(reader.read, piece)
            delta = await writing.run(read) if reader.begins_with_prompt(piece) else read()
            if delta.parts or delta.places or delta.finished:
                for event in exchange.add(delta):
                    yield event.encode()
        for event in exchange.end(Usage.count([results[index] for index in sorted(results)], num_prompts)):
            yield event.encode()
    except Exception as reason:
        yield exchange.failure(clipped(_failure(reason))).encode()


def _failure(reason: Exception) -> Exception:
    """Returns the error that a client gets for a failure during its answer: never that its request is wrong."""
    if isinstance(reason, RuntimeError | Gone):
        return reason
    logger.error("an answer could not be written", exc_info=reason)
    return RuntimeError(f"the answer could not be written ({type(reason).__name__})")


def _as_sent(error: ValueError, sent_names: dict[str, str]) -> ValueError:
    """Returns an error about a setting with the name of the field that the client sent."""
    match = re.match(r"got (\w+) ", str(error))
    if match is None or match[1] not in sent_names:
        return error
    name = sent_names[match[1]]
    return WrongValue(str(error).replace(match[1], name, 1), name)
