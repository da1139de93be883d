"""Rounds with a drafter of any kind: losslessness in float64, one program, meshes, refusals, caches filled to the end.

Losslessness of block drafters: test_lossless.py.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import (
    assert_same_positions,
    cut_by_stops,
    drafted_as_plain,
    make_pair,
    planned_batch,
    prefilled,
    slow,
    slow_unless,
)
from compiled import CAPACITY, assert_copies_nothing, assert_one_program, gathered_shapes
from conftest import RANDOM_MODEL, compilations, needs_8_devices, random_pair
from drafted_pairs import ACCEPTED, KINDS, ONE_LAYER, TEXTS, accepted_pair
from refusals import refused

from treeflash_jax import GenerateConfig, make_mesh
from treeflash_jax.core import programs
from treeflash_jax.decoding import loops, rounds
from treeflash_jax.drafters.block.heads import HEADS
from treeflash_jax.drafters.steering import make_shifts
from treeflash_jax.engine.schedule.prefill import Prefill
from treeflash_jax.engine.schedule.runner import Runner
from treeflash_jax.models import decoder
from treeflash_jax.trees import NO_TOKEN

PROMPTS = [[3, 4, 5, 3, 4], [8]]
TREE = {"nodes": 8, "children": 4}
DRAFTS = {
    "best-first": {"nodes": 8},
    "few lanes": {"nodes": 9, "lanes": 2, "children": 3},
    "all lanes": {"nodes": 16, "lanes": 15, "depths": 5},
    "one node": {"nodes": 1},
    "two nodes": {"nodes": 2},
    "many nodes": {"nodes": 64, "depths": 5},
    "walk": {"builder": "walk", "depths": 4},
    "one level": {"builder": "walk", "depths": 1},
    "chain": {"builder": "chain"},
}
MIXED = {"temperature": [0.0, 0.7, 1.3], "top_k": [0, 0, 9], "seed": 3}


# Every drafter, every draft of each kind of expander, every kind of verifier; not every combination of the three.
OTHERS = ("frequent", "windows", "shared", "assistant", "clusters")
LOSSLESS = [
    slow_unless(kind not in ("gru", "selector", "lilicorr", "steered"), kind, "best-first", "qwen3")
    for kind in ACCEPTED
    if kind not in OTHERS
]
DRAFTED = {
    "frequent": ("all lanes", "one node", "many nodes", "chain"), "eagle3": ("few lanes", "two nodes", "walk", "one level"),
    "ngram": ("walk",), "gru": ("walk",), "selector": ("chain",), "lilicorr": ("walk",), "language_model": ("walk",),
    "steered": ("walk", "few lanes"),
    "mtp": ("chain",),
}  # fmt: skip
LOSSLESS += [slow(kind, name, "qwen3") for kind, names in DRAFTED.items() for name in names]
LOSSLESS += [slow("language_model", "best-first", "qwen3_5"), slow("eagle3", "walk", "qwen3_5")]
LOSSLESS += [slow("windows", "best-first", "gpt_oss"), slow("shared", "best-first", "gemma4")]
OF_GEMMA = (
    ("clusters", "few lanes"),
    ("clusters", "all lanes"),
    ("assistant", "walk"),
    ("assistant", "chain"),
    ("clusters", "one level"),
)
LOSSLESS += [slow(kind, draft, "gemma4") for kind, draft in OF_GEMMA]


@pytest.mark.parametrize(("kind", "name", "verifier"), LOSSLESS)
def test_drafted_output_is_one_token_output(float64, kind, name, verifier):
    """Greedy and sampled with the same seed, three lengths together, with stops inside rounds."""
    pair, draft, texts = accepted_pair(kind, verifier), {"children": 6} | DRAFTS[name], TEXTS
    if hasattr(pair.drafter, "block_size"):
        draft = {option: value for option, value in draft.items() if option != "depths"} | {"candidates": 6}
    if kind == "ngram":  # texts with answers that repeat themselves
        plain = pair.generate(TEXTS, builder="none", batch_size=3, max_new_tokens=30, stop_ids=())
        texts = [[*result.prompt_ids, *result.ids] for result in plain]
    accepted = cut = 0
    for settings in ({}, MIXED, MIXED | {"seed": 4, "max_new_tokens": 1}):
        settings = {"max_new_tokens": 30, "stop_ids": (), "batch_size": 3} | settings
        results = drafted_as_plain(pair, texts, draft, **settings)
        accepted += sum(length - 1 for result in results for length in result.accept_lengths)
        for stop in {token for result in results for token in result.ids[8:20:3]}:
            cut += cut_by_stops(drafted_as_plain(pair, texts, draft, **settings | {"stop_ids": (stop,)}))
    assert accepted or name == "one node"
    assert cut or name in ("one node", "two nodes", "walk", "one level", "chain")


ON_A_MESH = [("frequent", TREE), ("mtp", TREE)]  # "block": test_sharded.py
ON_A_MESH += [("language_model", {"builder": "walk"}), ("steered", TREE), ("eagle3", {"builder": "paths", "nodes": 8})]
PENALTIES = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "logit_bias": {2: 1.0}, "min_new_tokens": 9}
ON_A_MESH += [("ngram", TREE | PENALTIES)]


@needs_8_devices
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "how"), ON_A_MESH, ids=str)
def test_eight_devices_answer_as_one(float64, kind, how):
    """Batch, heads and vocabularies are split, and a waiting prompt moves in; no round gathers logits or caches."""
    settings = {"max_new_tokens": 40, "stop_ids": (), "batch_size": 4}
    settings |= {} if how.get("builder") == "paths" else {"temperature": [0.0, 0.7, 0.0, 0.05, 1.0], "seed": 3}
    texts = [*TEXTS, [9, 8, 9, 8, 9], [5, 6]]
    programs.clear()
    pair = make_pair(ONE_LAYER, KINDS[kind], dtype=jnp.float64, mesh=make_mesh(4, 2))
    drafted = pair.generate(texts, **how | settings)
    gathered = {size for shape in gathered_shapes() for size in shape}
    assert kind == "frequent" or not gathered & {RANDOM_MODEL.vocab_size, 256}
    plain = make_pair(ONE_LAYER, KINDS[kind], dtype=jnp.float64).generate(texts, **how | settings | {"builder": "none"})
    assert [result.ids for result in drafted] == [result.ids for result in plain]
    is_accepted = max(max(result.accept_lengths) for result in drafted) > 1
    assert is_accepted or kind == "frequent" or "builder" in how, "control: drafts are accepted"


OF_BLOCKS = [({name: value}, f"{name} {value!r}") for name, value in (("candidates", 4), ("shortlist", 4), ("head", "mlp"))]
OF_LEVELS = [
    ({"block_size": 4}, "block_size 4"), ({"depths": 0}, "depths 0"), ({"children": 99}, "children 99"),
    ({"lanes": 0}, "lanes 0"), ({"lanes": 2, "builder": "walk"}, "lanes 2"),
    ({"lanes": 16, "nodes": 16}, "lanes 16, expected at most 15"),
]  # fmt: skip
REFUSED = {"eagle3": OF_BLOCKS + OF_LEVELS, "language_model": OF_BLOCKS + OF_LEVELS, "ngram": OF_BLOCKS}


@pytest.mark.parametrize("kind", REFUSED)
def test_options_that_a_drafter_lacks_are_refused(kind):
    pair, before = make_pair(ONE_LAYER, KINDS[kind]), len(programs.compiled())
    for settings, words in REFUSED[kind]:
        refused(partial(pair.generate, PROMPTS, **settings), words)
    assert len(programs.compiled()) == before


SHORT = [("ngram", {}), ("block", {"shortlist": 2}), ("block", {"ngrams": 6})]  # some of their entries have no child
SHORT += [("eagle3", {"ngrams": 6}), ("block", {"shortlist": 2, "ngrams": 2})]
FULL = [(kind, {"ngrams": 0}) for kind in ("frequent", "language_model")]
FULL += [("block", {"head": head, "ngrams": 0}) for head in HEADS if head not in ("linear", "lowrank", "lowrank-gated")]


@pytest.mark.parametrize(("kind", "settings"), [slow_unless(pair == SHORT[-1], *pair) for pair in SHORT + FULL], ids=str)
def test_no_token_is_offered_twice(kind, settings):
    """Along eight paths that take different children; the support of a proposal has distinct tokens besides NO_TOKEN."""
    model = make_pair(ONE_LAYER, replace(KINDS[kind], **{name: settings[name] for name in settings if name == "head"}))
    prompts = [[*range(RANDOM_MODEL.vocab_size)] * 3, [8]]  # the first contains every token three times
    plan, state = prefilled(model, prompts, builder="skeleton", nodes=8, children=6, **settings)
    lanes_w = jnp.arange(8)

    @jax.jit
    def drafted(weights, state):
        expander, offers = rounds.draft_expander(weights, state, plan), []
        state_bw = expander.start(8)
        for depth in range(expander.num_depths):
            offers += [expander.children(jnp.int32(depth), state_bw)]
            count_bw = jnp.maximum(jnp.sum(jnp.isfinite(offers[-1][1]), axis=-1), 1)
            child_bw = lanes_w % count_bw
            token_bw = jnp.take_along_axis(offers[-1][0], child_bw[..., None], axis=2)[..., 0]
            state_bw = expander.follow(jnp.int32(depth), state_bw, child_bw, token_bw)
        return offers, rounds.draft_tree(weights, state, plan)[1].support_bnc

    offers, support_bnc = jax.tree.map(np.asarray, drafted(model.weights, state))
    is_short = False
    for tokens_bwc, log_probs_bwc in offers:
        for at in np.ndindex(tokens_bwc.shape[:2]):
            tokens_c = tokens_bwc[at]
            offered = tokens_c[np.isfinite(log_probs_bwc[at])]
            assert len({*offered}) == offered.size and ((offered >= 0) & (offered < RANDOM_MODEL.vocab_size)).all()
            is_short |= 0 < offered.size < tokens_c.size
    assert is_short == ((kind, settings) in SHORT)
    for support_c in support_bnc.reshape(-1, support_bnc.shape[-1]):
        named = support_c[support_c != NO_TOKEN]
        assert len({*named}) == named.size


WALK = {"builder": "walk", "children": 4}
ONE_PROGRAM = [("block", {"builder": "none"}, 1)]
MORE = [
    ("block", TREE | {"candidates": 4}, 2),
    ("block", TREE | {"candidates": 4}, 1),
    ("eagle3", TREE, 2),
    ("ngram", WALK, 1),
    ("language_model", WALK, 2),
    ("steered", TREE, 2),
]
ONE_PROGRAM += [slow(*case) for case in MORE]


@pytest.mark.usefixtures("as_users_compile")
@pytest.mark.parametrize(("kind", "settings", "batch"), ONE_PROGRAM)
def test_a_round_is_one_program_that_copies_no_cache(kind, settings, batch):
    pair = random_pair() if kind == "block" else make_pair(ONE_LAYER, KINDS[kind])
    plan, inputs = planned_batch(pair, PROMPTS[:batch], CAPACITY, **settings)
    chunks = jax.device_put(jnp.int32(3))
    begun = loops.init_state(*inputs, plan=plan.shared, dtype=jnp.float32)
    read = loops.prefill_chunks.lower(pair.weights, begun, inputs.length_b, chunks, plan=plan.shared).compile()
    state = read(pair.weights, begun, inputs.length_b, chunks)
    assert_copies_nothing(read, state)
    assert_one_program(pair.weights, state, plan)


# Programs with processors also take what programs without them take.
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "is_processed"), [("block", True), ("block", False), ("ngram", True), ("eagle3", False)])
def test_nothing_recompiles_when_only_values_change(kind, is_processed):
    """Prompts, their number within the batch, settings of sampling and of processors, stop ids."""
    pair = make_pair(replace(ONE_LAYER, rms_norm_eps=2e-6), KINDS[kind])  # a pair whose programs no other test compiles
    rng = np.random.default_rng(0)

    def run(count: int) -> None:
        processors = {
            "repetition_penalty": float(rng.uniform(1.1, 2)), "presence_penalty": rng.uniform(0, 1, count).tolist(),
            "logit_bias": {i: 1.0 for i in range(rng.integers(1, 9))}, "min_new_tokens": 1,
        }  # fmt: skip
        pair.generate(
            [rng.integers(0, 64, rng.integers(1, 41)).tolist() for _ in range(count)],
            max_new_tokens=rng.integers(1, 34, count).tolist(), batch_size=4, **TREE,
            temperature=rng.choice([0.0, 0.6, 1.3], count).tolist(), top_k=rng.choice([0, 5], count).tolist(),
            top_p=rng.choice([0.3, 1.0], count).tolist(), min_p=float(rng.choice([0.0, 0.1])),
            seed=rng.integers(0, 99, count).tolist(), stop_ids=rng.integers(0, 60, rng.integers(0, 4)).tolist(),
            drafter_temperature=float(rng.choice([0.3, 1.0])), **(processors if is_processed else {}),
        )  # fmt: skip

    with compilations() as compiled:
        for count in (1, 2, 3, 4):  # host arrays of 1, 2, 3 and 4 sequences are made by different programs
            run(count)
    assert {"jit(prefill_chunks)", "jit(decode)"} <= {*compiled}, "control: their names are heard of"
    with compilations() as compiled:
        for number in range(20):
            run(1 + number % 4)
    assert not compiled


LEFT = [(kind, "qwen3") for kind in ("eagle3", "language_model")]
LEFT += [slow(kind, "qwen3") for kind in ("selector", "lilicorr", "windows", "mtp", "ngram")]
LEFT += [slow("eagle3", "qwen3_5"), slow("assistant", "gemma4")]


@pytest.mark.parametrize(("kind", "verifier"), LEFT)
def test_rounds_leave_the_state_of_one_prefill(float64, kind, verifier):
    """Drafter and verifier are shown every token once, at its position: caches, and what is kept of the last position."""
    pair, settings = accepted_pair(kind, verifier), {"capacity": 384, "nodes": 8, "children": 6}  # programs of answers
    plan, batch = planned_batch(pair, TEXTS, **settings)
    runner = Runner(plan, pair.weights)
    most_rounds, enough = jax.device_put((np.int32(4), np.int32(3)))
    state = Prefill(runner, batch).read_all()
    state = runner.call(loops.decode, pair.weights, state, most_rounds, enough, plan=plan)
    end_b = np.asarray(state.end_b)
    assert kind == "ngram" or (end_b > [len(text) + 5 for text in TEXTS]).any(), "drafts are accepted"
    texts = [tokens_s[: end - 1].tolist() for tokens_s, end in zip(state.tokens_bs, end_b, strict=True)]
    expected = Prefill(runner, planned_batch(pair, texts, **settings)[1]).read_all()
    got, wanted = ((here.cache, here.drafter) for here in (state, expected))
    assert_same_positions(got, wanted, end_b - 1, atol=1e-10)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        if x.ndim < 5:
            np.testing.assert_allclose(x, y, atol=1e-10)


def test_the_verifiers_last_position_shifts_the_next_draft(float64):
    """After the prompts and after rounds, by the layers that are named, in this order."""
    pair, settings = accepted_pair("steered"), {"capacity": 384, "nodes": 8, "children": 6}  # programs of answers
    plan, batch = planned_batch(pair, TEXTS, **settings)
    runner = Runner(plan, pair.weights)
    state = Prefill(runner, batch).read_all()
    found = [jax.device_get((state.drafter.shifts, state.end_b))]
    state = runner.call(loops.decode, pair.weights, state, *jax.device_put((np.int32(4), np.int32(3))), plan=plan)
    found += [jax.device_get((state.drafter.shifts, state.end_b))]
    shape, forward = state.tokens_bs.shape, jax.jit(decoder.forward, static_argnames=("config", "taps"))
    places = jnp.broadcast_to(jnp.arange(shape[1]), shape), decoder.causal_mask(*shape)
    out = forward(pair.weights.verifier, pair.verifier, state.tokens_bs, *places, taps=(0, 1))
    low, high = jnp.split(out.features_btj, 2, axis=-1)
    expected = jax.jit(make_shifts)(pair.weights.drafter["steering"], jnp.concatenate([low, low, high], axis=-1))
    for shifts, end_b in found:
        for got_b1f, expected_btf in zip(shifts, expected, strict=True):
            np.testing.assert_allclose(got_b1f[:, 0], expected_btf[np.arange(3), end_b - 2], atol=1e-10)
    assert np.all(found[1][1] > found[0][1])


def test_a_drafter_keeps_the_first_token_of_an_answer_while_longer_prompts_are_read(float64):
    """A pass over a longer prompt stores nothing for a sequence that has its first token, but needs room behind it."""
    model, rng, tree = accepted_pair("language_model"), np.random.default_rng(0), {"nodes": 8, "children": 6}
    chunk = model.plan(GenerateConfig(**tree)).shared.prefill_chunk
    texts = [rng.integers(0, 12, count).tolist() for count in (chunk, chunk + 8, 3)]
    call = model.prepare(texts, max_new_tokens=30, stop_ids=(), batch_size=3, **tree)  # programs of answers
    scheduler = call.schedule()
    scheduler.step(0)
    context = scheduler.state.drafter.context
    assert context.length_b.tolist() == [len(text) + 1 for text in texts]
    for number, text in enumerate(texts):
        assert np.all(np.asarray(context.states[0].keys_bnkse[number, :, :, len(text)]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["block", "language_model"])
def test_the_last_round_before_a_cache_grows_writes_where_it_should(kind):
    """A whole path is stored past the end of a text: if it does not fit, the store would begin too early.

    Texts of language models and of n-grams hold one token more than the verifier's cache.
    """
    model = make_pair(ONE_LAYER, KINDS[kind])
    path_length = model.plan(GenerateConfig(**TREE)).path_length
    texts = [np.random.default_rng(0).integers(0, 64, 255 - path_length).tolist(), [1, 2, 1, 2]]

    def after_a_round(texts: list[list[int]], grown: bool):
        plan, state = prefilled(model, texts, **TREE)
        return loops.decode(model.weights, loops.grow_caches(state, 384) if grown else state, jnp.int32(1), plan=plan)

    filled, roomy = after_a_round(texts, grown=False), after_a_round(texts, grown=True)
    assert filled.rounds_b.tolist() == [1, 1] and filled.capacity == 256, "the path of the longest text fills its cache"
    grown, expected = ((state.drafter, state.cache, state.tokens_bs) for state in (loops.grow_caches(filled, 384), roomy))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-4), grown, expected)
    assert after_a_round([[0, *texts[0]], texts[1]], grown=False).rounds_b.tolist() == [0, 0], "a longer path would not fit"
