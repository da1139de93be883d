"""Waiting prompts replace finished sequences: same answers, fewer rounds, no new programs, no copied caches."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import TREE, make_pair, prefilled, slow, slow_unless
from conftest import random_pair
from drafted_pairs import KINDS, ONE_LAYER, hybrid_pair

from treeflash_jax.core import programs
from treeflash_jax.decoding import loops
from treeflash_jax.engine import prepared_call
from treeflash_jax.engine.answers.result_reader import ResultReader
from treeflash_jax.engine.schedule import prefixes
from treeflash_jax.engine.schedule.admission import Admission
from treeflash_jax.engine.schedule.batching import SamplingSizes, choose_batch_size
from treeflash_jax.engine.schedule.open_scheduler import OpenScheduler
from treeflash_jax.engine.schedule.runner import Runner
from treeflash_jax.engine.schedule.slots import Slots

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [12, 13], [14, 15, 16], [17] * 20, [18, 19]]
SAMPLED = {"temperature": [0.0, 1.0, 0.7, 0.0, 1.0, 1.3, 0.0]}


SKELETON = TREE | {"builder": "skeleton", "temperature": 1.0}


@pytest.mark.parametrize("settings", [TREE | SAMPLED, *(slow(how) for how in ({"builder": "none"}, SKELETON))])
def test_answers_do_not_depend_on_the_batch(trained, settings):
    how = {"max_new_tokens": 24, "stop_ids": [3, 7, 11, 20, 33, 40], **settings}
    whole = trained.generate(PROMPTS, batch_size=8, **how)
    before = len(programs.compiled())
    few = trained.generate(PROMPTS, batch_size=2, **how)
    assert [result.ids for result in few] == [result.ids for result in whole]
    assert [result.accept_lengths for result in few] == [result.accept_lengths for result in whole]
    assert len({len(result.ids) for result in few}) > 1, "sequences have to finish at different times"
    added = [program.function.__name__ for program in programs.compiled()[before:]]
    assert all(
        added.count(name) <= most for name, most in (("decode", 1), ("admit", 1), ("init_state", 2), ("prefill_chunks", 2))
    )
    count = len(programs.compiled())
    again = dict(trained.generate_each(PROMPTS, batch_size=2, **how))
    assert [again[i].ids for i in range(len(PROMPTS))] == [result.ids for result in whole]
    assert len(programs.compiled()) == count


def test_calls_of_few_prompts_share_their_programs(trained):
    sizes = {number: choose_batch_size(number) for number in (1, 2, 3, 4, 5, 8, 9, 100)}
    assert sizes == {1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 8: 8, 9: 8, 100: 8}
    how = {"max_new_tokens": 24, "stop_ids": [3, 7, 11, 20, 33, 40], **TREE}
    eight = trained.generate([*PROMPTS, [20]], **how)
    count = len(programs.compiled())
    seven = trained.generate(PROMPTS, **how)
    assert [result.ids for result in seven] == [result.ids for result in eight[:7]]
    assert len(programs.compiled()) == count and seven[0].compile_seconds == 0


def test_answers_come_as_they_finish(trained, monkeypatch):
    monkeypatch.setattr(prepared_call, "ROUNDS_PER_DISPATCH", 1)
    how = {"prompts": PROMPTS, "max_new_tokens": 24, "stop_ids": [3, 7, 11, 20, 33, 40], "batch_size": 8, **TREE}
    rounds = [len(result.accept_lengths) for result in trained.generate(**how)]
    order = [place for place, _ in trained.generate_each(**how)]
    assert sorted(order) == [*range(len(PROMPTS))] != order
    assert [rounds[place] for place in order] == sorted(rounds)


@pytest.mark.parametrize("kind", [slow_unless(kind == "block", kind) for kind in ("block", "ngram", "mtp", "hybrid")])
def test_prompts_go_on_from_the_caches_of_any_slot(float64, kind, monkeypatch):
    """Of a running answer, of one that has ended, of one that is overwritten; NaN is never copied."""
    monkeypatch.setattr(prefixes, "LEAST_REUSED", 4)
    model = hybrid_pair() if kind == "hybrid" else make_pair(ONE_LAYER, KINDS[kind], dtype=jnp.float64)
    settings = {"max_new_tokens": 12, "stop_ids": (), "nodes": 4, "temperature": 0.7}
    settings |= {"children": 4, "candidates": 6} if kind == "hybrid" else {}
    first, other = [3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8]
    [answer] = model.generate([first], **settings)
    prompts = [first, other, first + answer.ids, first[:6] + [7, 7, 7], first, other]
    expected = [model.generate([prompt], **settings)[0].ids for prompt in prompts]
    call = model.prepare([first], **settings, batch_size=2)
    runner, sizes = Runner(call.plan, model.weights, can_cut=True), SamplingSizes.fit(call.requests)
    server = OpenScheduler(runner, sizes, batch_size=2, capacity=256)
    reader, answers, reused = ResultReader(server, model), {}, {}
    for number, prompt in enumerate(prompts):
        _, requests = model.settings_and_requests([prompt], **settings)
        server.submit([replace(request, number=number) for request in requests])
    for ready in server.decode_all(3, lambda slots: []):
        for slot, result in zip(ready, reader.read_results(ready), strict=True):
            number = server.slots.requests[slot].number
            answers[number], reused[number] = result.ids, result.reused
    assert [answers[number] for number in range(6)] == expected
    assert reused[0] == reused[1] == 0 and reused[2] > 0
    if kind != "hybrid":  # recurrent states are kept of two places only
        assert reused[2] >= len(first) - 1 and [reused[number] for number in (3, 4, 5)] == [5, 7, 0]
    ends_b, vocab_size = server.state.cache.length_b, model.verifier.vocab_size
    damaged = server.state.replace(tokens_bs=server.state.tokens_bs.at[jnp.arange(2), ends_b].set(vocab_size))
    for state, has_some in ((server.state, True), (damaged, False)):
        assert prefixes.count_reusable(state, prompts[5] + answers[5], vocab_size).any() == has_some
    _, requests = model.settings_and_requests([prompts[5] + answers[5], [10]], **settings)
    _, copies = prefixes.copy_prefixes(runner, server.state, requests, 2)
    assert copies.count_b[0] > copies.count_b[1] == 0
    assert not any(np.any(x[1]) for x in jax.tree.leaves((copies.cache, copies.drafter)))


def test_a_batch_keeps_its_slots_busy():
    """Sequences of very different lengths take about as many rounds as their tokens over the slots."""
    lengths = np.random.default_rng(0).integers(1, 100, 200).tolist()
    slots, rounds, ends, finished = Slots(16), 0, {}, []
    admission = Admission(slots)
    admission.add(range(len(lengths)))
    while admission.waiting or slots.requests:
        if admission.is_refill_due:
            group = admission.make_group([None] * admission.num_next)
            for slot, request in group.requests.items():
                slots.hold(slot, request)
                ends[slot] = rounds + lengths[request]
            continue
        rounds = sorted(ends.values())[admission.enough_done - len(slots.free) - 1]
        done = [slot for slot, end in ends.items() if end <= rounds]
        finished += [slots.requests[slot] for slot in done]
        slots.release(done)
        ends = {slot: ends[slot] for slot in slots.requests}
    assert sorted(finished) == list(range(len(lengths)))
    assert rounds < 1.2 * sum(lengths) / slots.size + max(lengths)
    one_after_the_other = sum(max(lengths[at : at + 16]) for at in range(0, len(lengths), 16))
    assert rounds < 0.75 * one_after_the_other


def test_a_slot_has_one_owner_at_a_time():
    slots = Slots(2)
    (slot,) = slots.reserve([1])
    slots.hold(slot, "request")
    with pytest.raises(KeyError):
        slots.hold(slot, "another")
    slots.release([slot])
    for again in (lambda: slots.hold(slot, "another"), lambda: slots.release([slot])):
        with pytest.raises(KeyError):
            again()
    assert slots.requests == {} and slots.free == [0, 1]


@pytest.mark.usefixtures("as_users_compile")
def test_admission_writes_the_replaced_sequences_only():
    model = random_pair()
    (_, state), (_, fresh) = (prefilled(model, prompts, **TREE) for prompts in ([[1, 2], [3, 4], [5]], [[6, 7, 8], [9]]))
    old = [np.asarray(x) for x in (state.tokens_bs, state.cache.states[0].keys_bnkse)]
    new = [np.asarray(x) for x in (fresh.tokens_bs, fresh.cache.states[0].keys_bnkse)]
    places = jnp.array([2, -1])
    compiled = loops.admit.lower(state, fresh, places).compile()
    for shape in {x.keys_bnkse.shape for x in state.cache.states}:
        sizes = ",".join(map(str, shape))
        assert f"f32[{sizes}]" in compiled.as_text()
        assert not re.findall(rf"= f32\[{sizes}\]\S* copy\(", compiled.as_text())
    after = compiled(state, fresh, places)
    for x, before, came in zip((after.tokens_bs, after.cache.states[0].keys_bnkse), old, new, strict=True):
        np.testing.assert_array_equal(np.asarray(x)[:2], before[:2])
        np.testing.assert_array_equal(np.asarray(x)[2], came[0])
    assert after.end_b.tolist() == [2 + 1, 2 + 1, 3 + 1]
