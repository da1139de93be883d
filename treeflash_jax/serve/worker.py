"""The thread that owns the device. It runs the scheduler, and sends the pieces of answers to their submissions."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from treeflash_jax.constraints.tables import allow_all
from treeflash_jax.core.checks import expect
from treeflash_jax.core.error_text import clipped, logger, warn
from treeflash_jax.engine.answers.result_reader import ResultReader
from treeflash_jax.engine.answers.results import Chunk, Result
from treeflash_jax.engine.call.requests import Request
from treeflash_jax.engine.model import TreeFlash
from treeflash_jax.engine.prepared_call import call_weights
from treeflash_jax.engine.schedule.batching import refill_size
from treeflash_jax.engine.schedule.open_scheduler import OpenScheduler
from treeflash_jax.engine.schedule.prefixes import LEAST_REUSED
from treeflash_jax.engine.schedule.runner import Runner
from treeflash_jax.engine.settings.defaults import find_defaults
from treeflash_jax.engine.settings.generate_config import MAX_TOP_LOG_PROBS, GenerateConfig
from treeflash_jax.serve.metrics import Metrics
from treeflash_jax.serve.options import ServeOptions
from treeflash_jax.serve.request_maker import RequestMaker

SERVER_ROUNDS_PER_DISPATCH = 4  # new requests, and the end of cancelled ones, wait for the end of a dispatch
CAPACITY_STEP = 256
MOST_FAILURES = 3  # number of dispatches that fail in a row before the device counts as lost


class QueueFull(Exception):
    """Too many answers are waiting for a slot."""


@dataclass(frozen=True)
class Piece:
    """A piece of the answer with this index in its submission. The last piece has the Result."""

    index: int
    chunk: Chunk
    result: Result
    is_last: bool


@dataclass(eq=False)
class Submission:
    """Answers to one HTTP request.

    Attributes:
      streams: True sends pieces while the answer grows; False sends only the finished answer.
      pieces: queue of Pieces. It ends with an exception if decoding failed, and with None after `Worker.cancel`.
    """

    requests: list[Request]
    streams: bool = False
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    pieces: asyncio.Queue = field(default_factory=asyncio.Queue)
    since: float = field(default_factory=time.perf_counter)

    def send(self, piece: Piece | Exception | None) -> None:
        """Adds a piece from the worker's thread. Drops it if the server's event loop has ended."""
        with suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, piece)


@dataclass
class UnfinishedAnswer:
    """An unfinished answer.

    Attributes:
      index: index of the answer in its submission.
      first_time: time of its first token.
      last_time: time of its last piece.
    """

    submission: Submission
    index: int
    first_time: float | None = None
    last_time: float = 0.0


class Worker(threading.Thread):
    """Decodes the requests of all submissions in the slots of one scheduler.

    The constructor compiles every program. Settings of requests are data, and need no other programs.

    Attributes:
      request_maker: maker of the submissions' requests.
      error: exception that ended the thread, if one did.
    """

    def __init__(self, model: TreeFlash, config: GenerateConfig, metrics: Metrics, options: ServeOptions):
        super().__init__(name="treeflash decoding", daemon=True)
        self.model, self.metrics = model, metrics
        config = replace(config, sampling="model")
        self.error: BaseException | None = None
        self.request_maker = RequestMaker(model, config, context=options.context, schema_states=options.schema_states)
        slots = options.slots or find_defaults(model.device, model.dtype).slots
        self._limit = slots + options.queue
        self._actions: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._unfinished: dict[int, UnfinishedAnswer] = {}  # by number of the request
        self._failures = 0  # number of dispatches that failed since the last successful one
        self._num_unfinished = 0  # includes requests that the thread has not admitted yet
        self._lock = threading.Lock()
        self._stops = self._has_ended = False
        num_top = min(MAX_TOP_LOG_PROBS, model.verifier.vocab_size)  # programs record what any request may ask for
        plan = model.plan(replace(config, log_probs=True, top_log_probs=num_top), slots)
        if plan.why_plain is not None:
            warn(f"decoding one token at a time: {plan.why_plain}")
        # Answers end within the context, but the last round of an answer or the last chunk of a prompt may go beyond it.
        room = 1 + max(plan.path_length, plan.shared.prefill_chunk)
        capacity = -(-(self.request_maker.context + room) // CAPACITY_STEP) * CAPACITY_STEP
        sequences = slots + refill_size(slots) + (1 if options.ui else 0)  # the last one is for trees that the page draws
        model.check_memory(batch=sequences, capacity=capacity, drafts=plan.drafts, can_cut=True)
        runner = Runner(plan, call_weights(model, config, plan), model.mesh, can_cut=True)
        self._scheduler = OpenScheduler(runner, self.request_maker.sizes, batch_size=slots, capacity=capacity)
        self._reader = ResultReader(self._scheduler, model)
        all_slots, admission = self._scheduler.slots, self._scheduler.admission
        metrics.watch(running=lambda: all_slots.size - len(all_slots.free), waiting=lambda: len(admission.waiting))
        self._warm_up(draws_trees=options.ui)

    def _warm_up(self, *, draws_trees: bool) -> None:
        """Runs every program once: prefill of new, repeated and scored prompts, rounds with automata, drafts to draw."""
        maker = self.request_maker
        [first] = maker.make_requests([[0] * max(1, min(LEAST_REUSED + 2, maker.context - 3))], max_new_tokens=2)
        text = first.ids + self._decode(first).ids
        [second] = maker.make_requests([text[: maker.context - 1]], max_new_tokens=1)
        if maker.sizes.automaton is not None:
            second = replace(second, automaton=allow_all(self.model.verifier.vocab_size))
        self._decode(maker.make_requests([first.ids], max_new_tokens=0, prompt_log_probs=True)[0])
        result = self._decode(second)
        if draws_trees and result.draft_again is not None:
            result.draft_again([0, 0], [1], 0)

    def _decode(self, request: Request) -> Result:
        self._scheduler.submit([request])
        results = []
        for finished in self._scheduler.decode_all(SERVER_ROUNDS_PER_DISPATCH, lambda slots: []):
            results += self._reader.read_results(finished)
        self._reader.forget(request)
        return results[0]

    def submit(self, submission: Submission) -> None:
        """Queues the requests of a submission.

        Raises the errors of `check_room`, and RuntimeError if decoding has ended.
        """
        with self._lock:
            self.check_room(len(submission.requests))
            if self._has_ended:
                raise RuntimeError("decoding has ended; see the server's log")
            self._num_unfinished += len(submission.requests)
            self._actions.put(partial(self._admit, submission))

    def check_room(self, count: int) -> None:
        """Raises QueueFull if `count` answers have no room now, and ValueError if they never will."""
        most = f"at most {self._limit}, those in slots and in the queue (--slots, --queue)"
        expect(count <= self._limit, "number of answers", count, most)
        if self._num_unfinished + count > self._limit:
            got = f"{count} answers to make besides {self._num_unfinished}"
            raise QueueFull(f"got {got}, expected at most {self._limit} together; try again later")

    def cancel(self, submission: Submission) -> None:
        """Drops the unfinished requests of a submission. Their slots are free after the running dispatch."""
        self._actions.put(partial(self._drop, submission, None))

    def stop(self, seconds: float | None = None) -> bool:
        """Ends the thread after the running dispatch. Returns whether it ended within `seconds`."""
        self._stops = True
        self._actions.put(lambda: None)
        self.join(seconds)
        return not self.is_alive()

    def run(self) -> None:
        try:
            while not self._stops:
                try:
                    self._run_actions()
                    if self._scheduler.has_work:
                        self._step()
                except Exception as error:  # the device failed: answers with a slot are lost
                    self._recover(error)
        except BaseException as error:
            self.error = error
            logger.exception("decoding ended")
        self._end_submissions()

    def _recover(self, error: Exception) -> None:
        """Drops the answers that had a slot when a dispatch failed. Raises the error if too many failed in a row."""
        logger.exception("a dispatch failed")
        lost = [self._unfinished.get(request.number) for request in self._scheduler.recover()]  # None: already answered
        for submission in {answer.submission for answer in lost if answer is not None}:
            self._drop(submission, RuntimeError(clipped(error)))
        self._failures += 1
        if self._failures == MOST_FAILURES:
            raise error

    def _end_submissions(self) -> None:
        """Ends all submissions, admitted or not, and refuses later ones."""
        with self._lock:
            self._has_ended = True
        while not self._actions.empty():
            self._actions.get()()
        reason = "the server ends" if self.error is None else f"decoding ended: {self.error}"
        for submission in {answer.submission for answer in self._unfinished.values()}:
            self._drop(submission, RuntimeError(clipped(reason)))

    def _run_actions(self) -> None:
        """Runs all waiting actions. If there is no request, waits for an action."""
        is_idle = not self._unfinished
        while not self._stops:
            try:
                self._actions.get(block=is_idle)()
            except queue.Empty:
                return
            is_idle = False

    def _admit(self, submission: Submission) -> None:
        for index, request in enumerate(submission.requests):
            self._unfinished[request.number] = UnfinishedAnswer(submission, index)
        self._scheduler.submit(submission.requests)

    def _step(self) -> None:
        scheduler, requests = self._scheduler, self._scheduler.slots.requests
        finished = scheduler.step(SERVER_ROUNDS_PER_DISPATCH, self._reader.find_stopped)
        self._failures = 0
        now = time.perf_counter()
        answers = {slot: self._unfinished[requests[slot].number] for slot in sorted(requests)}
        for answer in answers.values():
            self._observe_piece(answer, now)
        for slot, answer in answers.items():
            request = requests.get(slot)
            if request is None:  # it was dropped because another answer of its submission failed
                continue
            if slot not in finished and not answer.submission.streams:
                continue
            try:
                [(chunk, result)] = self._reader.read_chunks([slot], finished)
            except ValueError as error:  # the verifier computed NaN
                self._drop(answer.submission, RuntimeError(clipped(error)))
                continue
            if slot in finished:
                self.metrics.observe(result, now - answer.first_time)
                self._close(request)
            answer.submission.send(Piece(answer.index, chunk, result, slot in finished))
        scheduler.slots.release([slot for slot in finished if slot in requests])

    def _observe_piece(self, answer: UnfinishedAnswer, now: float) -> None:
        if answer.first_time is None:
            answer.first_time = now
            self.metrics.first_token.observe(now - answer.submission.since)
        else:
            self.metrics.gap.observe(now - answer.last_time)
        answer.last_time = now

    def _close(self, request: Request) -> None:
        del self._unfinished[request.number]
        self._reader.forget(request)
        with self._lock:
            self._num_unfinished -= 1

    def _drop(self, submission: Submission, reason: Exception | None) -> None:
        for request in submission.requests:
            if request.number in self._unfinished:
                self._scheduler.cancel(request)
                self._close(request)
        submission.send(reason)
