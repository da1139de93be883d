"""Caches that are kept between the answers of a conversation, and prompts that are read in pieces."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import make_assistant, make_pair, slow_unless, with_shared_layers, with_windows_and_sinks
from drafted_pairs import KINDS, ONE_LAYER

import treeflash_jax as tf
from treeflash_jax.engine.call.requests import Request
from treeflash_jax.engine.schedule import batching, prefill
from treeflash_jax.engine.schedule.runner import Runner


def answer(model: tf.TreeFlash, prompt: list[int], session: tf.Session | None, **settings) -> list[int]:
    *_, result = model.stream(prompt, session=session, **settings)
    return result.ids


WINDOWS = with_windows_and_sinks(ONE_LAYER)
SHARED = with_shared_layers(ONE_LAYER)
KEPT = [(ONE_LAYER, None, None), (WINDOWS, "block", None), (ONE_LAYER, "language_model", None), (SHARED, "ngram", None)]
KEPT += [(SHARED, "assistant", None), (ONE_LAYER, None, "int4"), (ONE_LAYER, "ngram", "int4")]


@pytest.mark.parametrize(
    ("verifier", "kind", "scheme"), [slow_unless(case == (ONE_LAYER, None, None), *case) for case in KEPT]
)
def test_answers_with_kept_caches_are_those_without(verifier, kind, scheme):
    """Four turns in float64: a prompt that goes on, one whose earlier message changed, one that outgrows the caches.

    Answers have penalties: those of an earlier turn are part of the prompt.
    """
    settings = {"max_new_tokens": 20, "repetition_penalty": 1.3, "presence_penalty": 0.5}
    settings |= {"nodes": 8, "children": 4} if kind else {}
    with jax.enable_x64(True):
        drafter = make_assistant(SHARED) if kind == "assistant" else KINDS.get(kind)
        model = make_pair(verifier, drafter, dtype=jnp.float64, scheme=scheme)
        assert model.quantize == scheme
        for temperature in (0.0, 0.8):
            rng, session, counts = np.random.default_rng(0), tf.Session(), []
            prompt, lengths = rng.integers(0, 64, 75).tolist(), []
            for turn, more in enumerate((3, 40, 80, 0)):
                alone = answer(model, prompt, None, **settings, temperature=temperature)
                [plain] = model.generate([prompt], **settings, temperature=temperature)
                *_, result = model.stream(prompt, session=session, **settings, temperature=temperature)
                assert result.ids == alone == plain.ids
                counts.append(result.reused)
                prompt = prompt + alone + rng.integers(0, 64, more).tolist()
                lengths.append(len(prompt) - more - 1)
                if turn == 1:
                    prompt[90] = (prompt[90] + 1) % 64
            assert counts[0] == 0 and counts[2] == 89, "up to the token before the one that changed"
            assert [counts[i] for i in (1, 3)] == [lengths[i - 1] for i in (1, 3)], "all but the last token"


@pytest.fixture(scope="module")
def small(short) -> tf.TreeFlash:
    return tf.load(verifier=short, drafter=None)


def test_a_session_starts_anew_with_another_model_or_after_its_state_is_lost(small):
    session, settings = tf.Session(), {"max_new_tokens": 4, "builder": "none"}
    answer(small, [5, 6, 7, 8], session, **settings)
    plan = small.prepare([[5, 6, 7, 8]], **settings).plan
    same, other = Runner(plan, small.weights), Runner(plan, jax.tree.map(jnp.copy, small.weights))
    state, request = session._last[0], Request(ids=[5, 6, 7, 8])
    kept = session.take_caches(same, request, 256)
    assert kept.count_b.tolist() == [3] and kept.cache is state.cache
    assert session.take_caches(same, request, 256) is None
    session.keep_caches(same, state)
    assert session.take_caches(other, request, 256) is None


def test_a_stream_has_the_caches_of_a_session_to_itself(small):
    """Another that starts meanwhile has fresh ones; one that is not read to its end gives them back."""
    session, prompts, settings = tf.Session(), ([5, 6, 7], [9, 8]), {"max_new_tokens": 6, "builder": "none"}
    expected = [answer(small, prompt, None, **settings) for prompt in prompts]
    streams = [small.stream(prompt, session=session, rounds_per_dispatch=1, **settings) for prompt in prompts]
    for stream in streams:
        next(stream)
    assert "empty" in repr(session)
    assert [[*stream][-1].ids for stream in reversed(streams)] == expected[::-1]
    left = small.stream([9, 8, 1], session=session, rounds_per_dispatch=1, **settings)
    next(left)
    left.close()
    assert "empty" not in repr(session) and answer(small, prompts[0], session, **settings) == expected[0]


def test_a_prompt_is_read_in_pieces_that_are_reported(small, monkeypatch, caplog):
    monkeypatch.setattr(prefill, "REPORT_SECONDS", 0.0)
    config = tf.GenerateConfig(builder="none", max_new_tokens=4)
    chunk = small.plan(config).shared.prefill_chunk
    length = 2 * chunk + 5
    with caplog.at_level(logging.WARNING, logger="treeflash_jax"):
        small.generate([list(range(length))], config)
    lines = [record.message for record in caplog.records if record.message.startswith("reading")]
    assert lines[1:] == [f"reading the prompt: {n:,} of {length:,} tokens" for n in (chunk, 2 * chunk)]


def test_caches_grow_with_a_long_answer(monkeypatch):
    """To twice their size; the tokens are the same as with caches that had room at first."""
    model, prompt = make_pair(ONE_LAYER, KINDS["block"]), [1, 2, 3] * 5
    settings = {"max_new_tokens": 300, "nodes": 4, "children": 4, "candidates": 4}
    expected = answer(model, prompt, None, max_new_tokens=300, builder="none")
    monkeypatch.setattr(batching, "ROOM", 100)
    scheduler = model.prepare([prompt], **settings).schedule()
    [*scheduler.decode_all(8, lambda slots: [])]
    assert scheduler.state.capacity == 512
    assert scheduler.state.tokens_bs[0, 15:315].tolist() == expected
