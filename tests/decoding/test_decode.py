"""The decode round and its loops: streaming, growing caches, statistics, no transfers, donation, no recompilation."""

import logging
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import SIZES, fresh_weights, make_pair, planned_batch, read_texts
from compiled import copies_in_loops
from conftest import FEW_TOKENS, RANDOM_DRAFTER, RANDOM_MODEL, random_pair
from refusals import refused

from treeflash_jax import TreeFlash, make_mesh
from treeflash_jax.bench import harness
from treeflash_jax.core import clock, programs
from treeflash_jax.decoding import loops
from treeflash_jax.decoding.state import DecodeState
from treeflash_jax.drafters import NgramDrafter
from treeflash_jax.engine.answers.results import Result
from treeflash_jax.engine.call.requests import make_requests
from treeflash_jax.engine.schedule.prefill import Prefill
from treeflash_jax.engine.schedule.runner import Runner
from treeflash_jax.engine.settings.defaults import describe_drafter_temperature
from treeflash_jax.engine.settings.generate_config import GenerateConfig
from treeflash_jax.models import decoder

TREE = {"nodes": 16} | SIZES
TWO_NODES = {"nodes": 2, "candidates": 4, "children": 4, "ngrams": 0}
PROMPT = [3, 4, 5, 17, 29]


def small_pair(mesh: jax.sharding.Mesh | None = None) -> TreeFlash:
    """A pair whose programs compile soon."""
    return make_pair(FEW_TOKENS, NgramDrafter(num_depths=3), mesh=mesh)


@pytest.fixture(scope="module")
def greedy(trained) -> Result:
    return trained.generate(PROMPT, max_new_tokens=60, **TREE)[0]


def test_tau_counts_only_tokens_of_the_answer(trained, greedy):
    """A limit or a stop id inside an accepted path: what was accepted beyond it is in `cut`, and in no statistic."""
    assert greedy.tau > 3 and 1 + sum(greedy.accept_lengths) == len(greedy.ids) == 60 and greedy.finished == "length"
    last = max(range(len(greedy.accept_lengths)), key=greedy.accept_lengths.__getitem__)
    before = 1 + sum(greedy.accept_lengths[:last])
    assert greedy.accept_lengths[last] > 2
    for ending in ({"max_new_tokens": before + 1}, {"max_new_tokens": 60, "stop_ids": [greedy.ids[before]]}):
        result = trained.generate(PROMPT, **TREE | ending)[0]
        count = len(result.ids)
        assert count <= before + 1 and result.ids == greedy.ids[:count]
        assert 1 + sum(result.accept_lengths) == count
        assert result.tau == (count - 1) / len(result.accept_lengths)
        assert result.accepted_before_cut == greedy.accepted_before_cut[: len(result.accept_lengths)]
        assert result.cut == sum(result.accepted_before_cut) + 1 - count
        *_, streamed = trained.stream(PROMPT, **TREE | ending)
        assert (streamed.accept_lengths, streamed.cut) == (result.accept_lengths, result.cut)
    assert trained.generate(PROMPT, max_new_tokens=before + 1, **TREE)[0].cut == greedy.accept_lengths[last] - 1 > 0


def test_log_probs_are_the_verifiers(greedy):
    model, prompt = small_pair(), [3, 4, 5, 7, 9] * 4
    settings = {"max_new_tokens": 30, "log_probs": True, "temperature": 0.9, "top_p": 0.8, "nodes": 4, "children": 4}
    tree = model.generate(prompt, **settings)[0]
    assert max(tree.accept_lengths) > 1, "control: drafts are accepted"
    ids = jnp.asarray([prompt + tree.ids])
    log_probs_tv = jax.nn.log_softmax(read_texts(model.weights.verifier, model.verifier, ids)[1][0])
    expected = log_probs_tv[jnp.arange(len(prompt) - 1, ids.size - 1), ids[0, len(prompt) :]]
    np.testing.assert_allclose(tree.log_probs, expected, atol=1e-4)
    assert greedy.log_probs is None


@pytest.mark.slow
def test_logits_in_bfloat16_are_nearer_to_float32_with_a_residual_stream_in_float32():
    """Mean errors of four random models."""
    config, errors = replace(RANDOM_MODEL, num_layers=16), []
    ids = jax.random.randint(jax.random.key(1), (8, 16), 0, 64)
    read = partial(read_texts, config=config, tokens_bt=ids, taps=(3,))
    for seed in (0, 1, 2, 3):
        narrow = fresh_weights(decoder.specs(config), seed, 0.1, jnp.bfloat16)
        (out, plain), (wide_out, wide) = (read(narrow, residual_dtype=dtype) for dtype in (None, jnp.float32))
        assert (plain.dtype, wide.dtype) == ("bfloat16", "float32")
        assert out.features_btj.dtype == wide_out.features_btj.dtype == "bfloat16"
        _, exact = read(jax.tree.map(lambda x: x.astype(jnp.float32), narrow))
        errors.append([jnp.std(x.astype(jnp.float32) - exact) for x in (wide.astype(jnp.bfloat16), wide, plain)])
    rounded, ours, theirs = np.mean(errors, axis=0)
    assert ours < rounded < 0.8 * theirs, "both the logits and the stream bring them nearer"


@pytest.mark.parametrize("drafts", [{"nodes": 8}, {"builder": "none"}])
def test_prefill_and_rounds_in_bfloat16_make_float32_logits_on_a_cpu(monkeypatch, drafts):
    pair, seen, logits = random_pair(), [], decoder.logits
    weights = jax.tree.map(lambda x: x.astype(jnp.bfloat16), pair.weights)
    model = TreeFlash(RANDOM_MODEL, weights, drafter=RANDOM_DRAFTER)
    monkeypatch.setattr(decoder, "logits", lambda *args: seen.append(logits(*args).dtype.name) or logits(*args))
    plan, batch = planned_batch(model, [PROMPT], **drafts)
    state = jax.eval_shape(partial(loops.init_state, plan=plan.shared, dtype=model.dtype), *batch)
    loops.prefill_chunks.trace(weights, state, batch.length_b, jnp.int32(1), plan=plan.shared)
    loops.decode.trace(weights, state, jnp.int32(1), plan=plan)
    assert seen == ["float32"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [None, (2, 2)])
def test_a_stacked_cache_holds_what_one_array_per_layer_does(sizes):
    """After prefill, growth of the caches and rounds."""
    model, prompts = small_pair(sizes and make_mesh(*sizes)), [[3, 4, 5, 7, 9], [4, 5, 7, 9]]
    plan, batch = planned_batch(model, prompts, nodes=4, children=4)

    def run(stacks_cache: bool) -> DecodeState:
        here = replace(plan, shared=replace(plan.shared, stacks_cache=stacks_cache))
        runner = Runner(here, model.weights, model.mesh)
        state = runner.call(loops.grow_caches, Prefill(runner, batch).read_all(), capacity=512)
        return runner.call(loops.decode, model.weights, state, jnp.int32(8), plan=here)

    separate, stacked = run(False), run(True)
    assert (len(separate.cache.states), len(stacked.cache.states)) == (FEW_TOKENS.num_layers, 1)
    np.testing.assert_array_equal(stacked.tokens_bs, separate.tokens_bs)
    length = int(jnp.min(separate.cache.length_b))
    assert length >= len(prompts[1]) + 8
    expected = jax.tree.map(lambda *layers: np.concatenate(layers, axis=1), *separate.cache.states)
    for got, wanted in zip(*map(jax.tree.leaves, (stacked.cache.states, expected)), strict=True):
        np.testing.assert_allclose(got[:, :, :, :length], wanted[:, :, :, :length], atol=1e-5)


@pytest.mark.usefixtures("as_users_compile")
def test_a_loop_that_copies_a_cache_is_detected():
    """Control of the test that rounds copy no cache: positions read after the write need the cache as it was."""

    def step(index, carry):
        cache, total = carry
        changed = cache.at[:, :, index].set(total)
        return changed, total + cache[:, :, changed[0, 0, index, 0].astype(jnp.int32)]

    cache, total = jnp.zeros((2, 2, 256, 8)), jnp.zeros((2, 2, 8))
    loop = jax.jit(lambda *carry: jax.lax.fori_loop(0, 9, step, carry), donate_argnums=(0, 1))
    assert copies_in_loops(loop.lower(cache, total).compile(), cache.shape)


def test_a_drafter_of_another_model_is_pointed_out(caplog):
    model = random_pair()
    model.generate([[1, 2, 3]], max_new_tokens=70, **TWO_NODES)
    [warning] = [record for record in caplog.records if record.getMessage().startswith("tau is 1")]
    assert not harness.is_shown(warning)


def test_a_chain_is_a_whole_block_by_default(trained):
    size = lambda builder, nodes: trained.plan(GenerateConfig(builder=builder, nodes=nodes)).num_nodes  # noqa: E731
    assert size("chain", None) == size("walk", None) == size("chain", 99) == trained.drafter.block_size == 8
    assert size("chain", 4) == 4 and size("best-first", 99) == 99


def test_the_draft_temperature_follows_the_sampling_temperature(trained):
    sharp = replace(trained.drafter, drafter_temperature=0.5)

    def asked(drafter, *temperatures, **settings):
        config = GenerateConfig(temperature=temperatures, **settings)
        requests = make_requests([PROMPT] * len(temperatures), config, trained.verifier, drafter)
        return [request.settings.drafter_temperature for request in requests]

    temperatures, formula = (0.0, 0.3, 0.7, 1.0, 1.3), describe_drafter_temperature(sharp)
    assert asked(sharp, *temperatures) == [eval(formula, {"T": x}) for x in temperatures] == [0.5, 0.5, 0.7, 1.0, 1.0]
    assert asked(sharp, 1.0, drafter_temperature=0.2) == [0.2]
    assert asked(trained.drafter, 0.0) == [1.0], "published drafters draft at 1"


def test_tiny_temperatures_are_greedy(trained, greedy):
    assert trained.generate(PROMPT, max_new_tokens=60, temperature=1e-30, **TREE)[0].ids == greedy.ids
    requests = make_requests([PROMPT, PROMPT], GenerateConfig(temperature=[1e-6, 1e-4]), trained.verifier)
    assert [request.settings.temperature for request in requests] == [0.0, 1e-4]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        *(({name: value}, f"{name} {value!r}") for name, value in (
            ("block_size", 99), ("candidates", 132), ("children", 132), ("head", "linear"), ("shortlist", 10**6),
        )),
        *(({name: 1}, f"'{name}'; did you mean {meant}") for name, meant in (
            ("max_tokens", "max_new_tokens"), ("n", "samples"), ("do_sample", "temperature"), ("eos_token_id", "stop_ids"),
            ("temprature", "temperature"), ("num_speculative_tokens", "nodes"),
        )),
        ({"zzz": 1}, "unknown argument 'zzz', expected one of max_new_tokens, temperature"),
        ({"model": 1}, "'model'; verifier is an argument of tf.load"),
        ({"builder": "best-frist"}, "did you mean best-first?"),
        ({"attention": "flash9"}, "got attention 'flash9', expected one of "),
        ({"builder": "skeleton", "nodes": 1}, "nodes 1"),
        ({"acceptance": "traversal"}, "distribution 'deterministic', expected sampled nodes with their distribution"),
        ({"builder": "skeleton", "acceptance": "block"}, "tree of distribution 'skeleton', expected one sampled path"),
        ({"builder": "without-replacement", "acceptance": "k-sequential"}, "siblings drawn independently"),
        ({"temperature": [0.0, 1.0]}, "2 values of temperature for 1 prompts"),
        ({"max_new_tokens": [1, 2]}, "2 values of max_new_tokens for 1 prompts"),
        ({"stop_ids": [[1], [2]]}, "2 values of stop_ids for 1 prompts"),
        ({"stop_ids": [131]}, "stop id 131"),
        ({"stop": "\n"}, "stop strings, but the verifier's folder has no tokenizer"),
        ({"stop": [""]}, "at least 1 character"),
        ({"max_new_tokens": 2044}, "5 prompt tokens + 2044 new tokens"),
        ({"num_beams": 2}, "num_beams is not supported"),
        ({"logit_bias": {131: 1.0}}, "prompt 0: got logit_bias of id 131, expected 0 to 130"),
        ({"prompts": [PROMPT] * 2, "min_new_tokens": [0, 200]}, "prompt 1: got min_new_tokens 200, expected at most 128"),
        ({"prompts": []}, "no prompts"),
        ({"prompts": [[131]]}, "id 131"),
        ({"prompts": "text"}, "no tokenizer"),
    ],
)  # fmt: skip
def test_mistakes_are_refused_before_any_compute(trained, settings, words):
    before = len(programs.compiled())
    refused(lambda: trained.generate(**{"prompts": PROMPT} | settings), words)
    assert len(programs.compiled()) == before


def test_after_a_warmup_nothing_compiles(monkeypatch, caplog):
    programs.clear()
    monkeypatch.setattr(clock, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(clock.Clock, "has_announced", False)
    caplog.set_level(logging.INFO, logger="treeflash_jax")
    model, prompts = small_pair(), [[3, 4, 5], [7, 8], [9]]
    settings = {"nodes": 4, "children": 4, "max_new_tokens": 20, "batch_size": 2}
    assert model.warmup(prompt_tokens=30, num_prompts=3, **settings) > 0
    note, *others = [record.message for record in caplog.records]
    assert note.startswith("compiling, once for this batch size, length and tree")
    assert all(re.fullmatch("compiling [a-z ]+(, [12] of 2)?", other) for other in others)
    compiled = programs.compiled()
    functions = {loops.make_keys, loops.init_state, loops.prefill_chunks, loops.decode, loops.admit}
    assert {program.function for program in compiled} == functions
    results = model.generate(prompts, temperature=[0.0, 0.9, 0.0], stop_ids=[1, 2], **settings)
    assert programs.compiled() == compiled and [result.compile_seconds for result in results] == [0, 0, 0]
    assert model.warmup(prompt_tokens=30, num_prompts=3, **settings) == 0 and len(caplog.records) == 1 + len(others)
    model.generate(prompts, **settings | {"max_new_tokens": 200})
    assert programs.compiled() == compiled, "caches do not depend on the length of answers"
    refused(lambda: model.warmup(prompt_tokens=5000, nodes=4), "5000 prompt tokens")


def test_the_first_call_is_as_fast_as_later_ones():
    """Neither compilation nor the slow first run of a program counts; one of three tries, since other programs run too."""
    model = random_pair()

    def is_as_fast() -> bool:
        programs.clear()
        first, *later = (model.generate(PROMPT, max_new_tokens=20, **TWO_NODES)[0].seconds for _ in range(5))
        return first < 2 * max(later)

    assert any(is_as_fast() for _ in range(3))


def test_equal_layers_are_traced_and_lowered_once():
    """A program of six layers has the operations of one with three, and calls them more often."""

    def lowered(num_layers: int) -> str:
        model = make_pair(replace(RANDOM_MODEL, num_layers=num_layers), RANDOM_DRAFTER)
        plan, batch = planned_batch(model, [PROMPT], nodes=8, **SIZES)
        state = jax.eval_shape(partial(loops.init_state, plan=plan.shared, dtype=model.dtype), *batch)
        return loops.decode.lower(model.weights, state, jnp.int32(1), plan=plan).as_text()

    few, many = lowered(3), lowered(6)
    assert many.count("stablehlo.dot_general") == few.count("stablehlo.dot_general")
    assert many.count("dynamic_update_slice") == few.count("dynamic_update_slice")
