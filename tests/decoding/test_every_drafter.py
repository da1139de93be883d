"""Rounds with a drafter of any kind: one program, no recompilation, and caches filled to their last slot."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import make_inputs, make_pair, prefilled
from compiled import CAPACITY, assert_copies_nothing, assert_one_program
from conftest import RANDOM_DRAFTER, RANDOM_MODEL, compilations

from treeflash_jax.decoding import loops, rounds
from treeflash_jax.drafters import causal_lm, eagle3, ngram, steering
from treeflash_jax.drafters.block.heads import HEADS
from treeflash_jax.trees import NO_TOKEN

SMALL = replace(RANDOM_MODEL, num_layers=2, num_kv_heads=1)
STEERS = steering.SteeringConfig(taps=(0, 1, 2), width=32, num_layers=2, ffn=64, rank=3)
KINDS = {
    "block": RANDOM_DRAFTER,
    "eagle3": eagle3.EagleConfig(
        layers=replace(RANDOM_MODEL, num_layers=1), target_hidden_size=32, draft_vocab_size=64, num_depths=3, taps=(0, 1, 2)
    ).fitted(RANDOM_MODEL),
    "language model": causal_lm.LanguageModelConfig(layers=SMALL, num_depths=3),
    "steered language model": causal_lm.LanguageModelConfig(layers=SMALL, num_depths=3, steering=STEERS),
    "ngram": ngram.NgramConfig(shortest=1, num_depths=3),
}
PROMPTS = [[3, 4, 5, 3, 4], [8]]
TREE = {"nodes": 8, "children": 4}
pytestmark = pytest.mark.filterwarnings("ignore:tau is")


SHORT = [("ngram", {}), ("block", {"shortlist": 2})]  # some of their entries have no child
FULL = [(kind, {}) for kind in KINDS if kind not in ("block", "ngram")] + [("block", {"head": head}) for head in HEADS]


@pytest.mark.parametrize(
    ("kind", "settings"), [*SHORT, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in FULL)], ids=str
)
def test_no_token_is_offered_twice(kind, settings):
    """Along eight paths that take different children; the support of a proposal has distinct tokens besides NO_TOKEN."""
    model = make_pair(RANDOM_MODEL, replace(KINDS[kind], **{name: settings[name] for name in settings if name == "head"}))
    prompts = [[*range(RANDOM_MODEL.vocab_size)] * 3, [8]]  # the first contains every token three times
    plan, state = prefilled(model, prompts, builder="hybrid", nodes=8, children=6, **settings)
    lanes_w = jnp.arange(8)

    @jax.jit
    def drafted(weights, state):
        expander, offers = rounds.draft_expander(weights, state, plan), []
        state_bw = expander.start(8)
        for depth in range(expander.num_depths):
            offers += [expander.children(jnp.int32(depth), state_bw)]
            count_bw = jnp.maximum(jnp.sum(jnp.isfinite(offers[-1][1]), axis=-1), 1)
            state_bw = expander.follow(jnp.int32(depth), state_bw, lanes_w % count_bw)
        return offers, rounds.draft_tree(weights, state, plan)[1].support_bnc

    offers, support_bnc = drafted(model.weights, state)
    is_short = False
    for tokens_bwc, log_probs_bwc in offers:
        flat = (np.asarray(x).reshape(-1, x.shape[-1]) for x in (tokens_bwc, log_probs_bwc))
        for tokens_c, log_probs_c in zip(*flat, strict=True):
            offered = tokens_c[np.isfinite(log_probs_c)]
            assert len({*offered}) == offered.size and ((offered >= 0) & (offered < RANDOM_MODEL.vocab_size)).all()
            is_short |= 0 < offered.size < tokens_c.size
    assert is_short == ((kind, settings) in SHORT)
    for support_c in np.asarray(support_bnc).reshape(-1, support_bnc.shape[-1]):
        named = support_c[support_c != NO_TOKEN]
        assert len({*named}) == named.size


# Blocks are in test_decode.py.
BUILDERS = [(kind, "best-first") for kind in KINDS if kind != "block"] + [("ngram", "walk"), ("language model", "walk")]


@pytest.mark.usefixtures("as_users_compile")
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "builder"), BUILDERS)
def test_a_round_is_one_program_that_copies_no_cache(kind, builder):
    model = make_pair(RANDOM_MODEL, KINDS[kind])
    settings = TREE if builder == "best-first" else {"children": 4}
    plan, inputs = make_inputs(model, PROMPTS, CAPACITY, builder=builder, **settings)
    begun, chunks = loops.begin(*inputs, plan=plan.for_prefill(), dtype=jnp.float32), jax.device_put(jnp.int32(3))
    read = loops.read.lower(model.weights, begun, inputs[1], chunks, plan=plan.for_prefill()).compile()
    state = read(model.weights, begun, inputs[1], chunks)
    assert_copies_nothing(read, state)
    assert_one_program(model.weights, state, plan)


@pytest.mark.parametrize(
    "kind", ["ngram", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind not in ("block", "ngram"))]
)
def test_nothing_recompiles_when_only_values_change(kind):
    model = make_pair(RANDOM_MODEL, KINDS[kind])

    def run(seed: int) -> None:
        rng = np.random.default_rng(seed)
        model.generate(
            [rng.integers(0, 64, rng.integers(1, 30)).tolist() for _ in range(2)],
            max_new_tokens=int(rng.integers(5, 20)), batch_size=2, **TREE,
            temperature=rng.choice([0.0, 0.6], 2).tolist(), top_k=rng.choice([0, 5], 2).tolist(),
            seed=rng.integers(0, 99, 2).tolist(), stop_ids=rng.integers(0, 64, rng.integers(0, 3)).tolist(),
            drafter_temperature=float(rng.choice([0.3, 1.0])),
        )  # fmt: skip

    run(0)
    with compilations() as compiled:
        for seed in range(1, 6):
            run(seed)
    assert not compiled


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_last_round_before_a_cache_grows_writes_where_it_should(kind):
    """A whole path is stored past the end of a text: if it does not fit, the store would begin too early.

    Texts of language models and of n-grams hold one token more than the verifier's cache.
    """
    model = make_pair(RANDOM_MODEL, KINDS[kind])
    plan, _ = make_inputs(model, PROMPTS, **TREE)
    texts = [np.random.default_rng(0).integers(0, 64, 255 - plan.path_length).tolist(), [1, 2, 1, 2]]

    def after_a_round(texts: list[list[int]], grown: bool):
        _, state = prefilled(model, texts, **TREE)
        return loops.decode(model.weights, loops.grow(state, 384) if grown else state, jnp.int32(1), plan=plan)

    filled, roomy = after_a_round(texts, grown=False), after_a_round(texts, grown=True)
    assert filled.rounds_b.tolist() == [1, 1] and filled.capacity == 256, "the path of the longest text fills its cache"
    grown, expected = ((state.drafter, state.cache, state.tokens_bs) for state in (loops.grow(filled, 384), roomy))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-4), grown, expected)
    assert after_a_round([[0, *texts[0]], texts[1]], grown=False).rounds_b.tolist() == [0, 0], "a longer path would not fit"
