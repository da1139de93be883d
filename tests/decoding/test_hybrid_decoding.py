"""Decoding over verifiers with layers of two kinds: trees, batches, sessions and meshes, in float64.

No state of a node exists: a path is committed from what one pass over the tree leaves. `test_models.test_hybrids` compares
the pass itself.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import (
    drafted_as_plain,
    fresh_weights,
    make_pair,
    planned_batch,
    read_texts,
    slow_unless,
)
from compiled import gathered_shapes
from conftest import DATA, RANDOM_DRAFTER, needs_8_devices
from drafted_pairs import HYBRID, SHARED, TEXTS, WINDOWS, hybrid_pair

import treeflash_jax as tf
from treeflash_jax.core import programs
from treeflash_jax.decoding import loops
from treeflash_jax.decoding.state import Weights
from treeflash_jax.drafters import NgramDrafter
from treeflash_jax.drafters.block.block_drafter import fresh_layers
from treeflash_jax.engine.schedule import batching
from treeflash_jax.formats import model_files
from treeflash_jax.models import caches, delta_rule

DRAFTS = {
    "tree": {"nodes": 8, "children": 6},
    "large": {"nodes": 150, "children": 12, "candidates": 12},  # some 12 of 30 accepted paths leave the first BLOCK nodes
    "chain": {"builder": "chain", "children": 6},
    "paths": {"builder": "paths", "nodes": 8, "children": 6},
}
SETTINGS = {"max_new_tokens": 24, "stop_ids": (), "batch_size": 2}
PLAIN = SETTINGS | {"batch_size": 3}


def assert_drafts_are_lossless(pair: tf.TreeFlash, texts: list, draft: dict, **settings) -> None:
    plain = pair.generate(texts, builder="none", **PLAIN | settings)
    results = drafted_as_plain(pair, texts, draft, plain=plain, **SETTINGS | settings)
    assert any(length > 1 for result in results for length in result.accept_lengths), "nothing was accepted"


DRAFTED = [
    (HYBRID, "block", "tree"),
    (HYBRID, "block", "large"),
    (HYBRID, "block", "paths"),
    (HYBRID, "mtp", "tree"),
    (HYBRID, "ngram", "chain"),
]
DRAFTED += [(SHARED, "block", "tree"), (SHARED, "block", "paths"), (SHARED, "ngram", "chain")]
DRAFTED += [(SHARED, "assistant", "tree"), (SHARED, "assistant", "paths")]


def test_kernels_of_a_call_are_in_its_passes(caplog):
    """In passes over prompts and over trees; neither without the setting. The first use says that they never ran."""
    pair = make_pair(HYBRID, NgramDrafter())

    def has_kernel(**settings) -> list[bool]:
        plan, batch = planned_batch(pair, [[1, 2, 3]], nodes=4, **settings)
        start = partial(loops.init_state, plan=plan.shared, dtype=pair.dtype)
        state, count = jax.eval_shape(start, *batch), jax.ShapeDtypeStruct((), jnp.int32)
        prefill = loops.prefill_chunks.trace(pair.weights, state, batch.length_b, count, plan=plan.shared)
        return [
            "gated_delta_rule" in str(x.jaxpr) for x in (prefill, loops.decode.trace(pair.weights, state, count, plan=plan))
        ]

    assert has_kernel() == [False, False] and not caplog.records
    assert has_kernel(kernels="pallas-tpu") == [True, True]
    line = "delta rule: kernel 'pallas-tpu' never ran on the device that it was written for"
    assert [record.message for record in caplog.records] == [line]


@pytest.mark.parametrize(
    "config, kind, name",
    [slow_unless(case[0] == HYBRID and case[1] == "block" and case[2] != "paths", *case) for case in DRAFTED],
)
def test_drafted_output_is_one_token_output(float64, config, kind, name):
    """Three texts in two slots: the third moves in while another is decoded, and a prompt takes more than one chunk."""
    pair, draft, texts = hybrid_pair(kind, config=config), DRAFTS[name], TEXTS
    if kind == "block":
        draft = {"candidates": 6} | draft
    elif kind == "ngram":  # texts with answers that repeat themselves
        plain = pair.generate(TEXTS, builder="none", **SETTINGS | {"max_new_tokens": 40})
        texts = [[*result.prompt_ids, *result.ids] for result in plain]
    assert_drafts_are_lossless(pair, texts, draft)
    if name != "paths":
        assert_drafts_are_lossless(pair, texts, draft, temperature=[0.0, 0.7, 1.3], top_k=[0, 0, 9], seed=3)


@pytest.mark.parametrize(
    "index, broken",
    [slow_unless(rule == "path", i, rule) for i, rule in enumerate(["mask", "path", "decay", "window"])],
)
def test_a_broken_rule_is_seen(float64, monkeypatch, index, broken):
    """Drafted output differs if a tree is read like a chain, another path is committed, or part of a commit is left out."""
    attend, commit = delta_rule.attend, delta_rule.commit

    def read_a_chain(*arrays, is_tree):
        *arrays, mask_btu = arrays
        return attend(*arrays, jnp.broadcast_to(jnp.tri(mask_btu.shape[1], dtype=bool), mask_btu.shape), is_tree)

    def commit_otherwise(state, new, count_b, path_bp=None):
        if broken == "path" and path_bp is not None:
            path_bp = jnp.broadcast_to(jnp.arange(path_bp.shape[1]), path_bp.shape)
        if broken == "decay":
            new = new.replace(decay_bth=0.5 * new.decay_bth)
        after = commit(state, new, count_b, path_bp)
        return after.replace(window_bjc=state.window_bjc) if broken == "window" else after

    pair = hybrid_pair()
    reference = pair.generate(TEXTS, builder="none", **PLAIN)
    if broken == "mask":
        monkeypatch.setattr(delta_rule, "attend", read_a_chain)
    else:
        monkeypatch.setattr(delta_rule, "commit", commit_otherwise)
    draft = DRAFTS["tree"] | {"candidates": 6, "nodes": 20 + index}  # a tree of its own: compiled programs are kept
    drafted = pair.generate(TEXTS[:1], **draft, **SETTINGS)
    assert drafted[0].ids != reference[0].ids


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_5_moe", "qwen3_5_text", "gemma4", "gemma4_moe", "gemma4_edge"])
def test_greedy_answers_are_those_of_transformers(float64, name):
    """With a random block drafter, three prompts together."""
    folder = DATA / "hybrid" / name
    config, params = model_files.load_verifier(folder, dtype=jnp.float64)
    expected = np.load(folder / "expected.npz")
    prompts = [expected[f"prompt{i}"].tolist() for i in range(3)]
    drafter = replace(RANDOM_DRAFTER, layers=fresh_layers(config, 1), mask_token_id=319, taps=(0, 2))
    drafter = replace(drafter, num_target_layers=config.num_layers)
    weights = fresh_weights(drafter.specs(), dtype=jnp.float64)
    pair = tf.TreeFlash(config, Weights(params, weights), drafter=drafter, stop_ids=())
    results = pair.generate(prompts, max_new_tokens=32, stop_ids=(), nodes=8, children=4, candidates=4)
    assert [result.ids for result in results] == [expected[f"greedy{i}"].tolist() for i in range(3)]


def test_a_session_goes_on_from_its_answer_or_the_end_of_its_prompt_or_reads_anew(float64):
    """Never wrong: a prompt that has the answer in it, one with another answer, and one whose first message changed."""
    kept = []
    pair, session = hybrid_pair(), tf.Session()
    settings = {"max_new_tokens": 12, "stop_ids": (), **DRAFTS["tree"], "candidates": 6}
    prompt = [1, 5, 2, 9, 4, 4, 3, 8]
    ends = []
    for turn in range(4):
        *_, alone = pair.stream(prompt, **settings)
        *_, result = pair.stream(prompt, session=session, **settings)
        assert result.ids == alone.ids
        kept.append(result.reused)
        answer = list(result.ids)
        if turn == 1:
            answer[5] = 11 - answer[5]
        ends.append((len(prompt), len(prompt) + len(answer) - 1))
        prompt = [*prompt, *answer, 6, 10]
        if turn == 2:
            prompt[2] = 11
    assert kept[0] == 0 and kept[1] == ends[0][1], "after the answer"
    assert ends[1][0] - 1 <= kept[2] <= ends[1][0], "after the prompt"
    assert kept[3] == 0, "nothing"
    for given in (session, None):  # copies as of the prompt's end are kept for sessions only
        scheduler = pair.prepare(prompt, **settings).schedule(given)
        scheduler.step(0)
        assert (scheduler.state.cache.states[0].at_prompt is None) == (given is None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [HYBRID, replace(WINDOWS, window=150), replace(SHARED, window=150)],
    ids=["states", "rings", "shared"],
)
def test_settings_of_each_prompt_log_probs_streams_and_larger_caches(float64, monkeypatch, config):
    """Three prompts in two slots; one answer outgrows the first caches, and the rings in them their window."""
    monkeypatch.setattr(batching, "ROOM", 8)
    pair, prompts = hybrid_pair(config=config), [TEXTS[2], TEXTS[1], TEXTS[0]]
    settings = {
        "max_new_tokens": [190, 12, 40], "temperature": [0.9, 0.0, 1.2], "top_k": [0, 0, 9], "seed": [1, 2, 3],
        "stop_ids": [[], [], [4]], "presence_penalty": [0.0, 0.5, 0.2],
    }  # fmt: skip
    common = DRAFTS["tree"] | {"candidates": 6, "log_probs": True}
    programs.clear()
    together = pair.generate(prompts, batch_size=2, **settings, **common)
    assert "grow_caches" in {program.function.__name__ for program in programs.compiled()}
    for number, (prompt, result) in enumerate(zip(prompts, together, strict=True)):
        own = {name: values[number] for name, values in settings.items()}
        *_, alone = pair.stream(prompt, **own, **common)
        assert (alone.ids, alone.finished) == (result.ids, result.finished)
        ids = np.array([*prompt, *result.ids])
        _, logits = read_texts(pair.weights.verifier, pair.verifier, np.pad(ids, (0, 320 - ids.size))[None])
        expected = np.asarray(jax.nn.log_softmax(logits[0]))[np.arange(len(prompt), ids.size) - 1, ids[len(prompt) :]]
        np.testing.assert_allclose(result.log_probs, expected, atol=1e-5)


@needs_8_devices
@pytest.mark.slow
@pytest.mark.parametrize(
    "config, kind, sizes",
    [
        (HYBRID, "block", {"data": 2, "model": 4}),
        (WINDOWS, "block", {"data": 2, "model": 2, "experts": 2}),
        (SHARED, "block", {"data": 2, "model": 2, "experts": 2}),
        (SHARED, "block", {"data": 2, "model": 4}),
        (SHARED, "assistant", {"data": 4, "model": 2}),
    ],
)
def test_eight_devices_answer_as_one(float64, config, kind, sizes):
    """Sequences and heads of the states are split; no round gathers the positions of a cache."""
    settings, draft = SETTINGS | {"batch_size": 4}, DRAFTS["tree"] | ({"candidates": 6} if kind == "block" else {})
    plain = hybrid_pair(config=config).generate(TEXTS, builder="none", **settings)
    programs.clear()
    pair = hybrid_pair(kind, mesh=tf.make_mesh(**sizes), config=config)
    drafted_as_plain(pair, TEXTS, draft, plain=plain, **settings)
    assert kind == "block" or 256 not in {size for shape in gathered_shapes() for size in shape}
    drafted_as_plain(pair, TEXTS, {"builder": "none"}, plain=plain, **settings)


def test_caches_of_recurrent_layers_do_not_grow_with_the_context():
    small, large = (caches.allocate(HYBRID, 2, capacity, jnp.bfloat16, can_cut=True) for capacity in (128, 256))
    for states in (small.states[0], small.grow(256).states[0]):
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x.shape, y.shape), states, large.states[0])
    alone = caches.allocate(HYBRID, 2, 128, jnp.bfloat16, can_cut=False)
    assert len(jax.tree.leaves(alone)) == len(jax.tree.leaves(small)) - 2
    assert small.states[0].now.state_bgez.dtype == jnp.float32 and small.states[0].now.window_bjc.dtype == jnp.bfloat16


def test_layers_with_windows_keep_all_positions_for_sessions_only():
    whole, alone = (caches.allocate(WINDOWS, 2, 128, jnp.bfloat16, can_cut=can_cut) for can_cut in (True, False))
    assert [state.keys_bnkse.shape[3] for state in whole.states] == [128, 128]
    assert [state.keys_bnkse.shape[3] for state in alone.states] == [WINDOWS.window, 128]
    assert alone.replace(length_b=jnp.array([40, 40])).longest_cut(jnp.array([40, 20])).tolist() == [40, 0]


def test_layers_that_share_have_no_caches():
    cache = caches.allocate(SHARED, 2, 128, jnp.bfloat16, can_cut=False)
    shapes = [state.keys_bnkse.shape[2:] for state in cache.states]
    assert shapes == [(SHARED.num_kv_heads, SHARED.window, 4), (1, 128, 8)] and len(cache.layers) == 2


def test_memory_of_a_session_is_that_of_whole_caches(float64, monkeypatch):
    pair, caches = hybrid_pair(None, config=WINDOWS), []

    def refuse(needed, *_):
        caches.append(needed.verifier_cache)
        raise MemoryError

    monkeypatch.setattr("treeflash_jax.engine.model.refuse_if_too_large", refuse)
    for session in (None, tf.Session()):
        with pytest.raises(MemoryError):
            list(pair.stream([3] * 300, session=session, builder="none", max_new_tokens=1))
    alone, whole = caches
    slots = whole / 2 / (2 * WINDOWS.num_kv_heads * WINDOWS.head_dim * 8)  # of keys and values of a layer
    assert slots > 300 and alone * 2 == whole * (1 + WINDOWS.window / slots)
