"""The worker's thread: many submissions get the answers of separate calls, also after dispatches that fail."""

import asyncio
import gc
import logging
import math
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
from own_calls import PLAIN, few_tokens, make_pool
from refusals import refused
from servers import wait_for

import treeflash_jax as tf
from treeflash_jax.core import programs, sharding
from treeflash_jax.decoding import loops
from treeflash_jax.decoding.state import LogProbs
from treeflash_jax.engine.answers import result_reader
from treeflash_jax.engine.answers.result_reader import GrowingAnswer, ResultReader
from treeflash_jax.serve.metrics import Metrics
from treeflash_jax.serve.options import ServeOptions
from treeflash_jax.serve.worker import MOST_FAILURES, QueueFull, Submission, UnfinishedAnswer, Worker

LIMIT = 503
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: out of memory"


@pytest.fixture(scope="module")
def pool():
    with jax.enable_x64(True):
        return make_pool(few_tokens(), 40, **PLAIN)


@pytest.fixture
def worker(float64, pool, monkeypatch):
    """A worker with three slots, whose thread computes in float64 too."""
    options = ServeOptions(slots=3, context=64, schema_states=0, queue=LIMIT - 3)
    worker = Worker(pool.model, tf.GenerateConfig(**PLAIN), Metrics(), options)
    run = worker.run

    def run_wide() -> None:
        with jax.enable_x64(True):
            run()

    monkeypatch.setattr(worker, "run", run_wide)
    worker.start()
    yield worker
    worker.stop()


def fail(monkeypatch, should_fail) -> None:
    call = programs.call

    def flaky(function, *args, **how):
        if function in (loops.decode, loops.prefill_chunks) and should_fail():
            raise RuntimeError(OUT_OF_MEMORY)
        return call(function, *args, **how)

    monkeypatch.setattr(programs, "call", flaky)


async def ask(
    worker: Worker,
    pool,
    place: int,
    *,
    cancels: bool = False,
    streams: bool = False,
    scores: Any = None,
    empty: bool = False,
) -> Any:
    """Returns the ids of an answer, an error, or None if it was cancelled.

    Args:
      scores: what the prompts' scores have to be; without, they are not asked for.
      empty: whether only the score is asked for.
    """
    prompts, how = pool.draw([place])
    how = {name: value[0] if name in pool.settings else value for name, value in how.items() if name != "builder"}
    if scores:
        how |= {"prompt_log_probs": True} | ({"max_new_tokens": 0} if empty else {})
    submission = Submission(worker.request_maker.make_requests(prompts, **how), streams=streams)
    worker.submit(submission)
    if cancels:
        worker.cancel(submission)
    ids: list[int] = []
    while True:
        piece = await asyncio.wait_for(submission.pieces.get(), 120)
        if piece is None or isinstance(piece, Exception):
            return piece
        ids += piece.chunk.ids
        score = piece.result.prompt_score
        assert (score is not None) == bool(scores)
        if scores:
            np.testing.assert_allclose(score.log_probs[1:], scores[place].log_probs[1:], atol=1e-6)
        if piece.is_last:
            assert ids == piece.result.ids
            return ids


def count_kept() -> int:
    """Number of submissions and answers in memory."""
    gc.collect()
    return sum(isinstance(x, Submission | UnfinishedAnswer | GrowingAnswer) for x in gc.get_objects())


@pytest.mark.slow
def test_the_shortest_context_has_room_for_the_warm_up(float64, pool):
    refused(lambda: ServeOptions(context=2), "got context 2, expected at least 3")
    options = ServeOptions(slots=3, context=3, schema_states=0)
    assert Worker(pool.model, tf.GenerateConfig(**PLAIN), Metrics(), options).request_maker.context == 3


def test_answers_are_those_of_own_calls_whatever_fails(worker, pool, monkeypatch, caplog):
    """Waves of requests, some cancelled; dispatches fail now and then, and what then had a slot gets an error."""
    rng, fates, before = np.random.default_rng(0), Counter(), count_kept()
    scores = pool.model.score(pool.prompts)
    fail(monkeypatch, lambda: worker._failures < MOST_FAILURES - 1 and rng.random() < 0.04)

    async def wave(count: int) -> None:
        places = rng.integers(0, len(pool.prompts), count).tolist()
        kinds = rng.choice(["answer", "score and answer", "score"], count, p=[0.6, 0.25, 0.15])
        asked = [
            ask(
                worker,
                pool,
                place,
                cancels=rng.random() < 0.1,
                streams=rng.random() < 0.5,
                scores=None if kind == "answer" else scores,
                empty=kind == "score",
            )
            for place, kind in zip(places, kinds, strict=True)
        ]
        for place, kind, got in zip(places, kinds, await asyncio.gather(*asked), strict=True):
            fates[type(got).__name__] += 1
            assert not isinstance(got, list) or got == ([] if kind == "score" else pool.expected[place])
            assert not isinstance(got, Exception) or str(got) == OUT_OF_MEMORY

    with caplog.at_level(logging.CRITICAL, logger="treeflash_jax"):
        for count in (1, 4, 40, 3, 60, 20):
            asyncio.run(wave(count))
    assert fates["list"] > 80 and fates["RuntimeError"] > 3, fates
    assert worker.error is None
    worker.check_room(LIMIT)
    wait_for(lambda: count_kept() <= before, seconds=30)


def test_log_probs_are_read_only_for_requests_that_want_them(worker, pool, monkeypatch):
    prompts, how = pool.prompts[:2], {"max_new_tokens": 9, "temperature": 0.0, "stop_ids": ()}
    wanted = {"log_probs": True, "top_log_probs": 2}
    [expected] = pool.model.generate(prompts[1:], batch_size=1, **how, **wanted, **PLAIN)
    to_host, fetched = sharding.to_host, []

    def is_log_probs(x: Any) -> bool:
        return isinstance(x, LogProbs)

    def noting(tree: Any) -> Any:
        fetched.extend(filter(is_log_probs, jax.tree.leaves(tree, is_leaf=is_log_probs)))
        return to_host(tree)

    async def run() -> list[Any]:
        make = worker.request_maker.make_requests
        submission = Submission(make(prompts[:1], **how) + make(prompts[1:], **how, **wanted), streams=True)
        worker.submit(submission)
        pieces: list[Any] = []
        while sum(piece.is_last for piece in pieces) < 2:
            pieces.append(await asyncio.wait_for(submission.pieces.get(), 120))
        return pieces

    monkeypatch.setattr(sharding, "to_host", noting)
    pieces = asyncio.run(run())
    indices = [piece.index for piece in pieces]
    assert 0 in indices[indices.index(1) :], "both answers have to be in one batch"
    assert len(fetched) == indices.count(1)
    plain, scored = ([piece.result for piece in pieces if piece.index == index] for index in range(2))
    assert all(result.log_probs is None and result.top_log_probs is None for result in plain)
    assert plain[-1].ids == pool.model.generate(prompts[:1], batch_size=1, **how, **PLAIN)[0].ids
    assert scored[-1].ids == expected.ids
    np.testing.assert_allclose(scored[-1].log_probs, expected.log_probs, atol=1e-6)
    np.testing.assert_allclose(scored[-1].top_log_probs, expected.top_log_probs, atol=1e-6)


def test_nan_in_a_prompts_score_fails_that_answer_alone(worker, pool, monkeypatch):
    """Also if other code reads the answer first, as the search for stop strings does."""
    read = result_reader._read_log_probs

    def read_nan(log_probs: LogProbs, slot: int, tokens: slice, num_top: int) -> Any:
        token_s, top_s = read(log_probs, slot, tokens, num_top)
        return [math.nan] * len(token_s) if tokens.start == 1 else token_s, top_s

    async def run() -> list[Any]:
        return await asyncio.gather(ask(worker, pool, 1), ask(worker, pool, 2, scores=[math.nan]))

    monkeypatch.setattr(result_reader, "_read_log_probs", read_nan)
    monkeypatch.setattr(ResultReader, "find_stopped", lambda reader, slots: reader._read(slots) and [])
    answer, error = asyncio.run(run())
    assert answer == pool.expected[1]
    assert isinstance(error, RuntimeError) and "got NaN as log-probability of a prompt's token" in str(error)
    assert worker._failures == 0


def test_gauges_count_answers_with_a_slot_and_waiting_ones(worker, monkeypatch):
    """While prompts are read, and while a finished answer still has its slot."""
    call, send, gauges = programs.call, Submission.send, []

    def note(phase: Any) -> None:
        values = (worker.metrics.registry.get_sample_value(f"treeflash_{name}") for name in ("running", "waiting"))
        gauges.append((phase, *values))

    def noting(function, *args, **how):
        note(function)
        return call(function, *args, **how)

    def send_noting(submission: Submission, piece: Any) -> None:
        note("sent")
        send(submission, piece)

    async def run() -> None:
        submission = Submission(worker.request_maker.make_requests([[1, 2], [3], [4], [5]], max_new_tokens=3, **PLAIN))
        worker.submit(submission)
        for _ in range(4):
            await asyncio.wait_for(submission.pieces.get(), 120)

    monkeypatch.setattr(programs, "call", noting)
    monkeypatch.setattr(Submission, "send", send_noting)
    asyncio.run(run())
    assert next(counts for phase, *counts in gauges if phase is loops.prefill_chunks) == [1, 3]
    assert min(waiting for *_, waiting in gauges) == 0
    assert [counts for phase, *counts in gauges if phase == "sent"][-1] == [1, 0]


def test_a_full_queue_is_an_error_for_now(worker):
    requests = worker.request_maker.make_requests([[5, 6, 7]] * LIMIT)

    async def fill() -> None:
        submission = Submission(requests)
        worker.submit(submission)
        try:
            with pytest.raises(QueueFull, match=f"got 1 answers .* at most {LIMIT} together; try again later"):
                worker.submit(Submission(requests[:1]))
        finally:
            worker.cancel(submission)
            assert await submission.pieces.get() is None

    asyncio.run(fill())


def test_a_worker_whose_device_is_lost_ends_every_submission(worker, pool, monkeypatch, caplog):
    fail(monkeypatch, lambda: True)

    async def run() -> list[Any]:
        return await asyncio.gather(*(ask(worker, pool, place) for place in range(20)))

    with caplog.at_level(logging.CRITICAL, logger="treeflash_jax"):
        answers = asyncio.run(run())
    worker.join(60)
    assert all(isinstance(answer, RuntimeError) for answer in answers)
    assert str(worker.error) == OUT_OF_MEMORY
    worker.check_room(LIMIT)

    async def ask_late() -> Any:
        return await ask(worker, pool, 0)

    with pytest.raises(RuntimeError, match="decoding has ended"):
        asyncio.run(ask_late())


def test_an_error_between_two_answers_of_a_step_loses_the_second_alone(worker, pool, monkeypatch, caplog):
    read, ended = ResultReader.read_chunks, []

    def flaky(reader, slots, ready):
        ended.extend(slots)
        if len(ended) == 2:
            raise RuntimeError(OUT_OF_MEMORY)
        return read(reader, slots, ready)

    async def run() -> list[Any]:
        requests = worker.request_maker.make_requests([[1, 2], [3]], max_new_tokens=3, **PLAIN)  # they end in one step
        submission = Submission(requests)
        worker.submit(submission)
        return [await asyncio.wait_for(submission.pieces.get(), 120) for _ in range(2)]

    monkeypatch.setattr(ResultReader, "read_chunks", flaky)
    with caplog.at_level(logging.CRITICAL, logger="treeflash_jax"):
        first, error = asyncio.run(run())
    assert len(first.result.ids) == 3 and str(error) == OUT_OF_MEMORY
    assert asyncio.run(ask(worker, pool, 0)) == pool.expected[0] and worker.error is None
