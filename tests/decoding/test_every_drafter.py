"""Rounds with a drafter of any kind: losslessness in float64, one program, meshes, refusals, caches filled to the end.

Block drafters have more cases of losslessness in lossless_float64.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import cut_by_stops, drafted_as_plain, make_inputs, make_pair, make_runner, prefilled, refused
from budgets import AUTO, beside, table
from budgets import MIXED as MIXED_TIMES
from compiled import CAPACITY, assert_copies_nothing, assert_one_program
from conftest import RANDOM_DRAFTER, RANDOM_MODEL, compilations, needs_8_devices
from test_selector import HOW as SELECTED
from test_selector import written

from treeflash_jax import TreeFlash, make_mesh
from treeflash_jax.core import programs
from treeflash_jax.decoding import loops, rounds
from treeflash_jax.drafters import causal_lm, eagle3, ngram, steering
from treeflash_jax.drafters.block.heads import HEADS
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.trees import BUILDERS, NO_TOKEN

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


def slow_unless(is_quick: bool, *values) -> object:
    return pytest.param(*values, marks=() if is_quick else pytest.mark.slow)


# Answers, of pairs whose vocabulary is so small that drafts are accepted and answers stop inside rounds.

FEW_TOKENS = ModelConfig(
    vocab_size=12, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4,
    max_positions=512,
)  # fmt: skip
ACCEPTED = {
    "eagle3": eagle3.EagleConfig(
        layers=replace(FEW_TOKENS, num_layers=1, num_kv_heads=1), target_hidden_size=16, draft_vocab_size=10,
        norm_output=True, taps=(0, 0, 1), num_depths=3,
    ).fitted(FEW_TOKENS),
    "language model": causal_lm.LanguageModelConfig(layers=FEW_TOKENS),
    "steered language model": causal_lm.LanguageModelConfig(
        layers=FEW_TOKENS, steering=steering.SteeringConfig(taps=(0, 0, 1), width=16, num_layers=2, ffn=24, rank=4)
    ),
    "ngram": ngram.NgramConfig(),
}  # fmt: skip
TEXTS = [[7, 8, 9, 10, 11] * 6 + [7, 8], [3], [1, 2, 3, 4] * 20]  # the last is longer than a chunk of the prefill
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
SAMPLED = {builder: {"builder": builder, "nodes": 9} for builder in BUILDERS if BUILDERS[builder].draws}
MIXED = {"temperature": [0.0, 0.7, 1.3], "top_k": [0, 0, 9], "seed": 3}


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


@cache
def accepted_pair(kind: str) -> TreeFlash:
    """A pair in float64; language models have the verifier's weights with noise on them."""
    pair = make_pair(FEW_TOKENS, ACCEPTED[kind], dtype=jnp.float64, scale=0.5)
    drafter = pair.weights.drafter
    if kind == "eagle3":  # 4 and 8 cannot be drafted
        drafter["offsets"] += jnp.asarray([0] * 4 + [1] * 3 + [2] * 3, jnp.int32)
    if "language" in kind:
        drafter |= {
            name: jax.tree.map(lambda x, y: x + 0.1 * y, x, drafter[name]) for name, x in pair.weights.verifier.items()
        }
    if "steering" in drafter:
        shape = drafter["steering"]["up"].shape
        drafter["steering"]["up"] = 0.02 * jax.random.normal(jax.random.key(2), shape, jnp.float64)
    return pair


@pytest.mark.parametrize(
    ("kind", "name"),
    [slow_unless(name == "best-first" and "steered" not in kind, kind, name) for kind in ACCEPTED for name in DRAFTS],
)
def test_drafted_output_is_one_token_output(float64, kind, name):
    """Greedy and sampled with the same seed, three lengths together, with stops inside rounds."""
    pair, draft, texts = accepted_pair(kind), {"children": 6} | DRAFTS[name], TEXTS
    if kind == "ngram":  # texts with answers that repeat themselves
        answers = pair.generate(TEXTS, builder="none", max_new_tokens=40, stop_ids=())
        texts = [[*answer.prompt_ids, *answer.ids] for answer in answers]
    accepted = cut = 0
    for settings in ({}, MIXED, MIXED | {"seed": 4, "max_new_tokens": 1}):
        settings = {"max_new_tokens": 30, "stop_ids": (), "batch_size": 3} | settings
        results = drafted_as_plain(pair, texts, draft, **settings)
        accepted += sum(sum(result.accept_lengths) - len(result.accept_lengths) for result in results)
        for stop in {token for result in results for token in result.ids[8:20:3]}:
            cut += cut_by_stops(drafted_as_plain(pair, texts, draft, **settings | {"stop_ids": (stop,)}))
    assert accepted or name == "one node"
    assert cut or name in ("one node", "two nodes", "walk", "one level", "chain")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ACCEPTED)
@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_trees_leave_greedy_answers_as_they_are(float64, kind, name):
    pair, draft = accepted_pair(kind), {"children": 6} | SAMPLED[name]
    drafted_as_plain(pair, TEXTS, draft, max_new_tokens=20, stop_ids=())
    assert pair.generate(TEXTS, max_new_tokens=20, temperature=0.7, **draft)


@needs_8_devices
@pytest.mark.slow
@pytest.mark.parametrize("how", [{"nodes": 8}, {"builder": "walk"}, {"builder": "paths", "nodes": 8}], ids=str)
@pytest.mark.parametrize("kind", ["eagle3", "language model", "ngram"])
def test_eight_devices_answer_as_one(float64, kind, how):
    """Batch, heads and vocabularies are split; no round gathers logits or caches."""
    settings = {"max_new_tokens": 40, "stop_ids": (), "children": 4}
    settings |= {} if how.get("builder") == "paths" else {"temperature": [0.0, 0.7, 0.0, 0.05], "seed": 3}
    texts = [*TEXTS, [9, 8, 9, 8, 9]]
    programs.clear()
    pair = make_pair(RANDOM_MODEL, KINDS[kind], dtype=jnp.float64, mesh=make_mesh(4, 2))
    drafted = pair.generate(texts, **how, **settings)
    [text] = [program.run.as_text() for program in programs.compiled(loops.decode)]
    gathered = [line.split(" all-gather")[0].split("{")[0] for line in text.splitlines() if " all-gather(" in line]
    assert " all-reduce(" in text and not [line for line in gathered if "64]" in line or ",256," in line]
    alone = make_pair(RANDOM_MODEL, KINDS[kind], dtype=jnp.float64)
    assert [result.ids for result in drafted] == [
        result.ids for result in alone.generate(texts, builder="none", **settings)
    ]
    assert max(max(result.accept_lengths) for result in drafted) > 1 or "builder" in how, "control: drafts are accepted"


OF_BLOCKS = [({name: value}, f"{name} {value!r}") for name, value in (("candidates", 4), ("shortlist", 4), ("head", "mlp"))]
OF_LEVELS = [
    ({"block_size": 4}, "block_size 4"), ({"depths": 0}, "depths 0"), ({"children": 99}, "children 99"),
    ({"lanes": 0}, "lanes 0"), ({"lanes": 2, "builder": "walk"}, "lanes 2"),
    ({"lanes": 16, "nodes": 16}, "lanes 16, expected at most 15"),
]  # fmt: skip
REFUSED = {"eagle3": OF_BLOCKS + OF_LEVELS, "language model": OF_BLOCKS + OF_LEVELS, "ngram": OF_BLOCKS}


@pytest.mark.parametrize("kind", REFUSED)
def test_options_that_a_drafter_lacks_are_refused(kind):
    pair, before = make_pair(RANDOM_MODEL, KINDS[kind]), len(programs.compiled())
    for settings, words in REFUSED[kind]:
        with refused(words):
            pair.generate(PROMPTS, **settings)
    assert len(programs.compiled()) == before


SHORT = [("ngram", {}), ("block", {"shortlist": 2}), ("block", {"ngrams": 6})]  # some of their entries have no child
FULL = [(kind, {}) for kind in KINDS if kind not in ("block", "ngram")]
FULL += [("block", {"head": head, "ngrams": 0}) for head in HEADS]


@pytest.mark.parametrize(("kind", "settings"), [slow_unless(pair in SHORT, *pair) for pair in SHORT + FULL], ids=str)
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


ONE_PROGRAM = [("block", {"builder": "none"}), ("block", TREE | {"candidates": 4}), ("block", AUTO), ("block", SELECTED)]
ONE_PROGRAM += [(kind, TREE) for kind in KINDS if kind != "block"]
ONE_PROGRAM += [(kind, {"builder": "walk", "children": 4}) for kind in ("ngram", "language model")]


@pytest.mark.usefixtures("as_users_compile")
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("kind", "settings"), [slow_unless(pair in ONE_PROGRAM[:2], *pair) for pair in ONE_PROGRAM])
def test_a_round_is_one_program_that_copies_no_cache(tmp_path, kind, settings, batch):
    """A pause, and a round of every bucket, included."""
    pair = make_pair(RANDOM_MODEL, KINDS[kind])
    if settings is AUTO:
        pair = beside(pair, tmp_path / "a.json", table(pair, MIXED_TIMES, 0.9))
    if settings is SELECTED:
        settings = SELECTED | {"selector": written(pair, tmp_path / "a.safetensors")}
    runner, inputs = make_runner(pair, PROMPTS[:batch], CAPACITY, **settings)
    plan, chunks = runner.plan.for_prefill(), jax.device_put(jnp.int32(3))
    begun = loops.begin(*inputs, plan=plan, dtype=jnp.float32)
    read = loops.read.lower(pair.weights, begun, inputs[1], chunks, plan=plan).compile()
    state = runner.begin(read(pair.weights, begun, inputs[1], chunks))
    assert_copies_nothing(read, state)
    text = assert_one_program(runner.all_weights, state, runner.plan)
    branches = text.count("branch_computations={") + text.count("true_computation=")
    assert branches >= 1 or runner.plan.policy is None, "buckets are branches"


@pytest.mark.parametrize("kind", [slow_unless(kind == "ngram", kind) for kind in KINDS if kind != "block"])
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
