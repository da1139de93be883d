"""Every answer is the one that a call alone gives, however requests share the slots of a batch.

Random prompts with settings of their own, many of them beginning alike, are answered one by one; then in batches of every
size, on meshes, with arrivals, cancellations and failures in between, and in conversations.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import pytest
from answers import slow, slow_unless, with_shared_layers
from conftest import FEW_TOKENS, needs_8_devices
from own_calls import DRAFTED, LONGEST, PLAIN, Pool, few_tokens, make_pool

import treeflash_jax as tf
from treeflash_jax.constraints.tables import AutomatonTable
from treeflash_jax.core import programs
from treeflash_jax.decoding import loops
from treeflash_jax.engine.answers.result_reader import ResultReader
from treeflash_jax.engine.call.requests import Request
from treeflash_jax.engine.schedule import prefixes
from treeflash_jax.engine.schedule.call_scheduler import CallScheduler
from treeflash_jax.engine.schedule.open_scheduler import OpenScheduler
from treeflash_jax.engine.schedule.runner import Runner
from treeflash_jax.serve.request_maker import server_sizes

SIZES = (5, 16)  # with one and two slots refilled at once
# Two states over twelve tokens; token 0 ends an answer in state 1 alone.
TABLE = AutomatonTable(
    np.array([[-1, 1, 0, -1], [1, 0, -1, 1]], np.int32), np.array([0, 1, 1, 1, 2, 2, 2, 3, 3, 1, 2, 3], np.int32)
)


def assert_batches_are_own_calls(pool: Pool, sizes: Sequence[int], answers: int) -> None:
    """Draws prompts until each batch size has given so many answers.

    Answers have limits of their own; or all have the same but for one, so that a batch ends together, in another order of
    slots than it began.
    """
    rng = np.random.default_rng(1)
    for size in sizes:
        count = 0
        while count < answers:
            ends_together = rng.random() < 0.5
            total = int(rng.integers(2 * size if ends_together else 1, 3 * size + 2))
            numbers = rng.integers(0, len(pool.prompts), total).tolist()
            limits = rng.integers(1, LONGEST + 1, total)
            stop_ids = [rng.integers(0, 12, rng.integers(0, 3)).tolist() for _ in numbers]
            if ends_together:
                limits[:] = 4
                limits[rng.integers(0, size)] = 1
                stop_ids = [[] for _ in numbers]
            prompts, how = pool.draw(numbers)
            how |= {"max_new_tokens": limits.tolist(), "stop_ids": stop_ids, "batch_size": size}
            for result, *case in zip(pool.model.generate(prompts, **how), numbers, limits, stop_ids, strict=True):
                assert result.ids == pool.answer(*case), (size, case)
            count += len(numbers)


SHARED = with_shared_layers(FEW_TOKENS)
BATCHES = [(FEW_TOKENS, PLAIN), (FEW_TOKENS, DRAFTED), (SHARED, PLAIN), (SHARED, DRAFTED)]


@pytest.mark.parametrize(("verifier", "draft"), [slow_unless(case == BATCHES[0], *case) for case in BATCHES])
def test_answers_of_a_batch_are_those_of_own_calls(float64, verifier, draft):
    model = few_tokens(verifier=verifier)
    assert_batches_are_own_calls(make_pool(model, 90, **draft), SIZES, 120)


def shift(logits_bnv: jax.Array, history: Any) -> jax.Array:
    """A processor that depends on the text."""
    return logits_bnv + 0.5 * jax.nn.one_hot(history.last_bn, logits_bnv.shape[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draft", "sizes"),
    [
        (PLAIN, (1, 2, 4, 7, 11, 12, 13, 19, 20, 21, 27, 28, 36, 37, 40)),  # both ends of every size of refill
        (DRAFTED | {"processor": shift, "presence_penalty": 0.5}, (1, 12, 21, 37)),
    ],
)
def test_answers_of_batches_with_every_size_of_refill_are_those_of_own_calls(float64, draft, sizes):
    model = few_tokens()
    assert_batches_are_own_calls(make_pool(model, 90, **draft), sizes, 60)


@needs_8_devices
@pytest.mark.parametrize(
    ("mesh", "draft"),
    [((2, 1), PLAIN), *(slow(mesh, DRAFTED) for mesh in ((1, 1), (2, 1), (4, 1), (2, 2)))],
)
def test_answers_on_a_mesh_are_those_of_own_calls(float64, mesh, draft):
    pool = make_pool(few_tokens(), 60, **draft)
    pool.model = few_tokens(tf.make_mesh(*mesh))
    assert_batches_are_own_calls(pool, [8, 24] if mesh != (2, 1) else [8], 90)


@dataclass
class Flaky:
    """A device whose programs fail now and then, before or after they took their donated arguments."""

    rng: np.random.Generator
    call: Any
    share: float
    failures: int = 0

    def __call__(self, function, *args, **how):
        fails = function in (loops.decode, loops.prefill_chunks, loops.admit) and self.rng.random() < self.share
        if fails and self.rng.random() < 0.5:
            self.call(function, *args, **how)
        if fails:
            self.failures += 1
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return self.call(function, *args, **how)


@pytest.mark.parametrize("draft", [PLAIN, slow(DRAFTED)])
@pytest.mark.parametrize("slots", [3, slow(1), slow(18)])
def test_answers_of_an_open_scheduler_are_those_of_own_calls(float64, monkeypatch, draft, slots):
    """Requests that arrive while others decode, are cancelled, have beginnings in common or a constraint, or are lost when
    a dispatch fails; prompts of several chunks."""
    monkeypatch.setattr(prefixes, "LEAST_REUSED", 4)
    model, rng = few_tokens(), np.random.default_rng(2)
    pool = make_pool(model, 60, **draft)
    call = model.prepare([pool.prompts[0]], **draft, max_new_tokens=4)
    plan = replace(call.plan, shared=replace(call.plan.shared, prefill_chunk=8))
    sizes = server_sizes(4, model.verifier.vocab_size, tf.GenerateConfig)
    scheduler = OpenScheduler(Runner(plan, model.weights, can_cut=True), sizes, batch_size=slots, capacity=64)
    reader, numbers = ResultReader(scheduler, model), Counter()
    requests: dict[int, tuple[list[int], Request]] = {}  # by number: the right answer, and the request
    constrained = make_constrained(model, pool, plan)
    flaky = Flaky(rng, programs.call, 0.0)
    monkeypatch.setattr(programs, "call", flaky)
    fates = Counter()
    while len(requests) < 150 or scheduler.has_work:
        for _ in range(int(rng.integers(0, 3)) if len(requests) < 150 else 0):
            place, limit = int(rng.integers(0, len(pool.prompts))), int(rng.choice([1, 4, 9, LONGEST]))
            has_rule = rng.random() < 0.2
            prompts, how = pool.draw([place])
            stop_ids = rng.integers(0, 12, rng.integers(0, 3)).tolist()
            _, [request] = model.settings_and_requests(prompts, **how | {"max_new_tokens": limit, "stop_ids": stop_ids})
            request = replace(request, number=len(requests), automaton=TABLE if has_rule else None)
            expected = (constrained if has_rule else pool).answer(place, limit, stop_ids)
            requests[request.number] = expected, request
            scheduler.submit([request])
        waiting = [number for number in requests if number not in numbers]
        if waiting and rng.random() < 0.1:
            number = int(rng.choice(waiting))
            scheduler.cancel(requests[number][1])
            numbers[number], fates["cancelled"] = 1, fates["cancelled"] + 1
        flaky.share = 0.03 if len(requests) > 20 else 0.0
        try:
            ready = scheduler.step(int(rng.integers(1, 4)))
        except RuntimeError:
            assert scheduler.state is None or scheduler.state.sampling.automaton is not None, "automata stay in the state"
            lost = scheduler.recover()
            numbers.update(request.number for request in lost)
            fates["lost"] += len(lost)
            assert len(scheduler.slots.free) == slots
            continue
        for slot, result in zip(ready, reader.read_results(ready), strict=True):
            request = scheduler.slots.requests[slot]
            assert result.ids == requests[request.number][0], request
            numbers[request.number] += 1
            fates["answered"] += 1
            fates["reused"] += result.reused > 0
        scheduler.slots.release(ready)
    assert set(numbers.values()) == {1} and len(numbers) == len(requests), "every request has one end"
    assert sorted(scheduler.slots.free) == [*range(slots)]
    assert flaky.failures > 2 and fates["answered"] > 50 and fates["cancelled"] > 3 and fates["reused"] > 2, fates


def make_constrained(model: tf.TreeFlash, pool: Pool, plan: Any) -> Pool:
    """The pool with answers under TABLE, each alone in the only slot of a scheduler."""
    answers = []
    for place in range(len(pool.prompts)):
        prompts, how = pool.draw([place])
        requests = [replace(request, automaton=TABLE) for request in model.settings_and_requests(prompts, **how)[1]]
        scheduler = CallScheduler(Runner(plan, model.weights), requests)
        for ready in scheduler.decode_all(64, lambda slots: []):
            results = ResultReader(scheduler, model).read_results(ready) if ready else []
        answers.append(results[0].ids)
    return replace(pool, expected=answers)


@pytest.mark.parametrize("draft", [PLAIN, DRAFTED])
def test_answers_of_interleaved_conversations_are_those_without(float64, draft):
    """Streams of several sessions in turns; some end early or go on from another text."""
    model, rng = few_tokens(), np.random.default_rng(3)
    how = {"max_new_tokens": 6, "temperature": 0.9, **draft}
    sessions = [tf.Session() for _ in range(3)]
    texts: list[list[int]] = [rng.integers(0, 12, 5 + i).tolist() for i in range(3)]
    reused = 0
    for _ in range(12):
        streams = [model.stream(text, session=session, **how) for text, session in zip(texts, sessions, strict=True)]
        left = int(rng.integers(0, 4))  # the stream of this conversation is not read to its end
        results = [next(stream) if place == left else [*stream][-1] for place, stream in enumerate(streams)]
        for stream in streams:
            stream.close()
        for place, (text, result) in enumerate(zip(texts, results, strict=True)):
            expected = model.generate([text], batch_size=1, **how)[0].ids
            if place != left:
                assert result.ids == expected
                reused += result.reused > 0
            more = rng.integers(0, 12, 3).tolist()
            texts[place] = (text + expected + more)[:100] if rng.random() < 0.8 else text[: len(text) // 2 + 1] + more
    assert reused > 10
