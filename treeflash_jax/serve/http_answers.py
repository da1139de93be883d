"""Answers to HTTP requests: submits their calls to the worker, and turns the pieces that come back into responses."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import NamedTuple

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from treeflash_jax.constraints.compilation import MOST_STORED_BYTES
from treeflash_jax.core.error_text import clipped, logger
from treeflash_jax.engine.answers.results import Chunk, Result
from treeflash_jax.serve.call_reader import CallReader
from treeflash_jax.serve.delta_reader import DeltaReader
from treeflash_jax.serve.protocols.exchange import Exchange
from treeflash_jax.serve.server_call import ServerCall, Usage
from treeflash_jax.serve.threads import Threads
from treeflash_jax.serve.worker import Piece, Submission

WRITING = 4  # threads that write whole answers
KEPT_ANSWERS = 64  # number of answers whose trees the chat page can show


class Gone(Exception):
    """The client went away."""


class ServerEnds(RuntimeError):
    """The server ends before the answer is finished."""


class Submitted(NamedTuple):
    """A request that was submitted to the worker.

    Attributes:
      num_tokens: number of tokens of its prompts.
      results: the answers so far, by index.
    """

    exchange: Exchange
    call: ServerCall
    submission: Submission
    num_tokens: int
    results: dict[int, Result]


class HttpAnswers:
    """Answers to HTTP requests, until the server ends.

    Attributes:
      latest: the last answers, by id of the request, so that the page can draw their trees; empty without `keeps_latest`.
        At most KEPT_ANSWERS, with automata of at most MOST_STORED_BYTES.
      num_unfinished: number of requests that were unfinished when `end` was called.
    """

    def __init__(self, reader: CallReader, *, keeps_latest: bool = False):
        self.reader = reader
        self.worker = reader.worker
        self.keeps_latest = keeps_latest
        self.latest: dict[str, Submitted] = {}
        self.writing = Threads(WRITING)
        self.drawing = Threads(1)  # a tree takes the caches of a whole context
        self.num_unfinished = 0
        self._has_ended = False
        self._preparing: set[asyncio.Task] = set()
        self._watching: set[asyncio.Task] = set()
        self._submissions: set[Submission] = set()

    @property
    def num_busy(self) -> int:
        """Number of threads that are running."""
        reading, compiling = self.reader.threads, self.reader.compiler.threads
        return sum(threads.busy for threads in (reading, compiling, self.writing, self.drawing))

    def end(self) -> None:
        """Ends all answers with an error, and refuses new requests."""
        self._has_ended = True
        preparing = [task for task in self._preparing if not task.done()]
        self.num_unfinished = len(preparing) + len(self._submissions)
        for task in preparing:
            task.cancel()
        for submission in self._submissions:
            submission.pieces.put_nowait(ServerEnds("the server ends"))
            self.worker.cancel(submission)

    async def answer(self, request: HttpRequest, kind: type[Exchange], body_kind: type[BaseModel]) -> Response:
        """Returns the response to a request in the form of a protocol. Raises as `CallReader.make_submission`, and Gone."""
        if self.worker.error is not None:
            raise HTTPException(503, "decoding ended; see the server's log")
        await request.body()  # must be read before other code receives from the client
        submitted = await self._submit_for_client(request, kind, body_kind)
        if self.keeps_latest:
            self.latest[submitted.exchange.id] = submitted
            while len(self.latest) > KEPT_ANSWERS or automata_bytes(self.latest.values()) > MOST_STORED_BYTES:
                del self.latest[next(iter(self.latest))]
        reader = DeltaReader(submitted.call, self.worker.model.tokenizer)
        if submitted.call.streams:
            events = stream(submitted, reader, self.writing)
            return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        return await respond(submitted, reader, self.writing)

    async def count(self, request: HttpRequest, kind: type[Exchange]) -> Response:
        """Returns the response to a request for the number of a prompt's tokens. Raises ValueError and HTTPException."""
        exchange, call = await self.reader.read(request, kind, kind.counted_kind)
        prompts = await self.reader.threads.run(lambda: self.reader.encode(call))
        return JSONResponse(exchange.count(sum(map(len, prompts))))

    async def _submit_for_client(self, request: HttpRequest, kind: type[Exchange], body_kind: type[BaseModel]) -> Submitted:
        """Submits a request. Once its client is gone, its preparation or submission is cancelled. Raises as `answer`."""
        preparing = asyncio.create_task(self._submit(request, kind, body_kind))
        self._preparing.add(preparing)
        gone = asyncio.create_task(wait_until_gone(request))
        self._watching.add(gone)  # asyncio itself keeps tasks weakly
        gone.add_done_callback(self._watching.discard)
        gone.add_done_callback(lambda _: preparing.cancel())
        try:
            submitted = await preparing
        except asyncio.CancelledError:
            if self._has_ended:
                raise ServerEnds("the server ends") from None
            if gone.done():
                raise Gone from None
            raise
        finally:
            self._preparing.discard(preparing)
        gone.add_done_callback(lambda _: self._drop(submitted.submission))
        return submitted

    async def _submit(self, request: HttpRequest, kind: type[Exchange], body_kind: type[BaseModel]) -> Submitted:
        if self._has_ended:
            raise ServerEnds("the server ends")
        exchange, call = await self.reader.read(request, kind, body_kind)
        submission, num_tokens = await self.reader.make_submission(call)
        self.worker.submit(submission)
        self._submissions.add(submission)  # here, because `end` may run before the awaiting task does
        return Submitted(exchange, call, submission, num_tokens, {})

    def _drop(self, submission: Submission) -> None:
        """Forgets a submission whose client is gone, or has received the whole answer."""
        self._submissions.discard(submission)
        self.worker.cancel(submission)


def automata_bytes(latest: Iterable[Submitted]) -> int:
    """Returns the size of the automata that requests have. Those with the same constraint share one."""
    requests = [request for submitted in latest for request in submitted.submission.requests]
    tables = {id(request.automaton): request.automaton for request in requests}
    return sum(array.nbytes for table in tables.values() for array in table or ())


async def wait_until_gone(request: HttpRequest) -> None:
    """Waits until the client is gone, or has its whole answer."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def pieces(submission: Submission) -> AsyncIterator[Piece]:
    """Yields the pieces of all answers of a submission. Raises Gone if it is cancelled, and what decoding raised."""
    unfinished = len(submission.requests)
    while unfinished > 0:
        piece = await submission.pieces.get()
        if piece is None:
            raise Gone
        if isinstance(piece, Exception):
            raise piece
        if piece.is_last:
            unfinished -= 1
        yield piece


async def respond(submitted: Submitted, reader: DeltaReader, writing: Threads) -> Response:
    """Returns the response with all answers of a submission. Raises RuntimeError and Gone.

    Args:
      writing: threads for writing the response, which would hold up the event loop.
    """
    try:
        async for piece in pieces(submitted.submission):
            submitted.results[piece.index] = piece.result
        return await writing.run(partial(_write, submitted, reader))
    except Exception as reason:
        raise _failure(reason) from None


def _write(submitted: Submitted, reader: DeltaReader) -> Response:
    """Returns the response that contains whole answers."""
    results = [result for _, result in sorted(submitted.results.items())]
    answers = []
    for index, result in enumerate(results):
        chunk = Chunk(ids=result.ids, text=result.text, rounds=len(result.accept_lengths))
        answers.append(reader.read(Piece(index, chunk, result, True)))
    return JSONResponse(submitted.exchange.response(answers, Usage.count(results, len(submitted.call.prompts))))


async def stream(submitted: Submitted, reader: DeltaReader, writing: Threads) -> AsyncIterator[bytes]:
    """Yields the events of all answers of a submission, or at their end an error.

    Args:
      writing: threads that read echoed prompts, which would hold up the event loop.
    """
    exchange = submitted.exchange
    try:
        for event in exchange.begin(Usage(submitted.num_tokens, 0, 0)):
            yield event.encode()
        async for piece in pieces(submitted.submission):
            submitted.results[piece.index] = piece.result
            read = partial(reader.read, piece)
            delta = await writing.run(read) if reader.begins_with_prompt(piece) else read()
            if delta.parts or delta.positions or delta.finished:
                for event in exchange.add(delta):
                    yield event.encode()
        results = [result for _, result in sorted(submitted.results.items())]
        for event in exchange.end(Usage.count(results, len(submitted.call.prompts))):
            yield event.encode()
    except Exception as reason:
        yield exchange.failure(clipped(_failure(reason))).encode()


def _failure(reason: Exception) -> Exception:
    """Returns the error that a client gets for a failure during its answer. It never blames the request."""
    if isinstance(reason, RuntimeError | Gone):
        return reason
    logger.error("an answer could not be written", exc_info=reason)
    return RuntimeError(f"the answer could not be written ({type(reason).__name__})")
