"""The budget policy: its choices, and answers that do not depend on them.

No test looks at a time: tables are made up, and what they make a round do is counted.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import make_runner, prefilled, refused
from budgets import AUTO, BUCKETS, FLAT, MIXED, STEEP, beside, table
from conftest import compilations, needs_8_devices, random_pair

from treeflash_jax import GenerateConfig, TreeFlash, make_mesh, trees
from treeflash_jax.core import programs
from treeflash_jax.decoding import budget, loops
from treeflash_jax.decoding.budget import BudgetChoice, Measured, choose_bucket, update_budget
from treeflash_jax.engine.planning import make_requests

PROMPTS = [[3, 4, 5, 17, 29], [7, 8], [100, 3, 50, 60, 61, 62, 63], [9]]
SAMPLED = {"temperature": [0.0, 0.7, 1.0, 0.0], "top_p": [1.0, 0.9, 1.0, 1.0], "seed": [1, 2, 3, 4]}


@pytest.fixture(scope="module")
def plain(trained):
    return {
        name: [result.ids for result in trained.generate(PROMPTS, builder="none", max_new_tokens=70, stop_ids=[], **how)]
        for name, how in (("greedy", {}), ("sampled", SAMPLED))
    }


def measured(seconds, step, *, positions=(256,)) -> Measured:
    return Measured(
        positions_c=jnp.asarray(positions, jnp.float32),
        round_cn=jnp.asarray(seconds, jnp.float32).reshape(len(positions), -1),
        step_c=jnp.broadcast_to(jnp.float32(step), (len(positions),)),
        reliability=jnp.float32(1),
        debt=jnp.float32(0),
    )


def make_budget(*, reliability=1.0, debt=0.0) -> budget.Budget:
    numbers = (budget.PRIOR_TOKENS, budget.PRIOR_TOKENS * reliability, debt)
    pending = {"features_bpj": jnp.zeros((3, 4, 2), jnp.float32), "pending_b": jnp.zeros(3, jnp.int32)}
    return budget.Budget(*map(jnp.float32, numbers), pause=jnp.int32(0), last_pause=jnp.int32(0), **pending)


def make_choice(expected, tokens, steps) -> BudgetChoice:
    return BudgetChoice(jnp.int32(0), jnp.int32(2), None, *map(jnp.float32, (expected, tokens, steps)))


@pytest.mark.parametrize("reliability", [0.5, 1.0, 1.4])
@pytest.mark.parametrize("seed", range(6))
def test_the_choice_is_that_of_trying_every_bucket(seed, reliability):
    rng = np.random.default_rng(seed)
    log_prob = np.sort(-rng.exponential(2, (3, 16)).astype(np.float32))[:, ::-1].copy()
    log_prob[:, 0] = 0
    log_prob[1, 9:] = -np.inf
    drafted = trees.root_only(jnp.zeros(3, jnp.int32)).replace(
        log_prob_bn=jnp.asarray(log_prob), valid_bn=jnp.asarray(np.isfinite(log_prob))
    )
    live = np.array([True, True, seed % 2 == 0])
    seconds = np.cumsum(rng.uniform(0.05, 1.0, 4))
    rates = []
    for nodes, time in zip(BUCKETS, seconds, strict=True):
        phi = np.mean([np.exp(log_prob[b, :nodes]).sum() for b in range(3) if live[b]])
        rates.append((1 + reliability * (phi - 1)) / time)
    now = make_budget(reliability=reliability)
    choice = choose_bucket(measured(seconds, 1.0), now, drafted, jnp.asarray(live), 256, tuple(BUCKETS))
    best = int(np.argmax(rates))
    assert int(choice.index) == best and int(choice.nodes) == BUCKETS[best]
    np.testing.assert_allclose([choice.tokens / choice.steps], [rates[best]], rtol=1e-5)


def test_times_lie_on_the_line_between_cache_sizes_and_stay_at_the_ends():
    times = measured([[1, 2], [3, 6]], 1.0, positions=(256, 512))
    for positions, expected in ((128, [1, 2]), (256, [1, 2]), (320, [1.5, 3]), (512, [3, 6]), (4096, [3, 6])):
        np.testing.assert_allclose(times.seconds(positions)[0], expected)


def test_a_cut_tree_is_the_smaller_tree(trained):
    plan, state = prefilled(trained, PROMPTS, nodes=16, candidates=8, children=8)
    whole = loops.draft(trained.weights, state, plan)
    for nodes in (2, 5, 8):
        smaller = loops.draft(trained.weights, state, replace(plan, num_nodes=nodes))
        jax.tree.map(np.testing.assert_array_equal, trees.first(whole, nodes), smaller)


@pytest.mark.parametrize(
    ("seconds", "step", "taken"),
    [
        (FLAT, 1.0, {16}),
        pytest.param(STEEP, 0.9, {2}, marks=pytest.mark.slow),  # a program of its own
        pytest.param(MIXED, 0.9, {4, 8}, marks=pytest.mark.slow),
        (FLAT, 0.25, {1, 16}),  # on the edge: with pauses
        pytest.param(MIXED, 0.42, {1, 4}, marks=pytest.mark.slow),
        (FLAT, 0.2, {1}),  # never drafts at all
    ],
)
@pytest.mark.parametrize("how", ["greedy", "sampled"])
def test_answers_are_those_of_one_token_decoding_for_every_choice(trained, plain, tmp_path, seconds, step, taken, how):
    model = beside(trained, tmp_path / "a.json", table(trained, seconds, step))
    results = model.generate(PROMPTS, max_new_tokens=70, stop_ids=[], **AUTO, **(SAMPLED if how == "sampled" else {}))
    assert [result.ids for result in results] == plain[how]
    nodes = {n for result in results for n in result.nodes}
    assert taken <= nodes <= {1, *BUCKETS}
    for result in results:
        assert len(result.nodes) == len(result.accept_lengths) and 1 + sum(result.accept_lengths) >= 70
        assert all(length <= count for length, count in zip(result.accept_lengths, result.nodes, strict=True))


def started(model: TreeFlash, prompts, capacity: int = 256, **settings) -> tuple:
    """Returns plan, weights and state of rounds that choose, after the prompts."""
    runner, batch = make_runner(model, prompts, capacity, **AUTO, **settings)
    return runner.plan, runner.all_weights, runner.start(batch)


def copied(state):
    return jax.tree.map(jnp.copy, state)


def test_one_token_decoding_keeps_the_requested_settings(trained, tmp_path):
    """Not by the defaults: its speed was measured with these settings."""
    auto = {**AUTO, "attention": "xla", "log_probs": True}  # no default
    asked = trained.plan(GenerateConfig(**auto | {"nodes": None}))
    entry = table(trained, FLAT, 0.2, attention="xla")
    model = beside(trained, tmp_path / "budget.json", entry)
    config = GenerateConfig(**auto)
    runner = model.make_runner(config, make_requests([[3]], config, model.verifier), 1, 199)
    plan = runner.plan
    assert plan.builder == "none" and plan == asked.one_token()
    assert plan.attention == "xla" and plan.log_probs
    assert plan == model.plan(replace(config, builder="none", nodes=None))


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "taken"), [pytest.param("xla", -1, marks=pytest.mark.slow), ("streamed", 0)])
def test_the_bucket_depends_on_the_positions_that_attention_reads(trained, tmp_path, attention, taken):
    """A few positions of a cache of 512, or all of them."""
    entry = table(trained, MIXED, 0.9, attention=attention)
    plan, weights, state = started(beside(trained, tmp_path / "a.json", entry), PROMPTS, 512, attention=attention)
    nodes = plan.policy.nodes
    assert len(nodes) > 1
    few_n = np.arange(len(nodes)) * 8 + 1
    times = measured([few_n, few_n[::-1]], 9.0, positions=(64, 512))
    state = loops.decode(weights.replace(policy=times), state, jnp.int32(2), plan=plan)
    assert state.nodes_bs[:, :2].tolist() == [[nodes[taken]] * 2] * len(PROMPTS)


@pytest.mark.slow
@pytest.mark.parametrize("paused", [1, 5, 8, 19])  # eight tokens may be pending
def test_after_a_pause_the_drafter_has_seen_all_it_would_have_seen(trained, tmp_path, paused):
    plan, weights, state = started(beside(trained, tmp_path / "a.json", table(trained, MIXED, 0.9)), PROMPTS[:2])
    assert state.policy.features_bpj.shape[1] == plan.path_length == 8
    every_round, plain = replace(plan, num_nodes=1, policy=None), copied(state.replace(policy=None, nodes_bs=None))
    expected = loops.decode(weights, plain, jnp.int32(paused), plan=every_round)
    state = state.replace(policy=state.policy.replace(pause=jnp.int32(paused)))
    state = loops.decode(weights, state, jnp.int32(paused), plan=plan)
    assert state.rounds_b.tolist() == [paused] * 2 and int(state.policy.pause) == 0
    assert state.drafter.context.length_b.tolist() != expected.drafter.context.length_b.tolist()
    state = loops.catch_up(weights, state, plan=plan)
    assert state.policy.pending_b.tolist() == [0, 0]
    ours, theirs = state.drafter.context, expected.drafter.context
    assert ours.length_b.tolist() == theirs.length_b.tolist() == state.cache.length_b.tolist()
    for mine, other in zip(jax.tree.leaves(ours.groups), jax.tree.leaves(theirs.groups), strict=True):
        for b, length in enumerate(ours.length_b.tolist()):
            np.testing.assert_allclose(mine[b, :, :length], other[b, :, :length], atol=1e-5)
    drafts = [loops.draft(trained.weights, each, replace(plan, policy=None)) for each in (state, expected)]
    np.testing.assert_array_equal(drafts[0].tokens_bn, drafts[1].tokens_bn)


@pytest.mark.slow
def test_after_a_pause_rounds_draft_again(trained, plain, tmp_path):
    plan, weights, state = started(beside(trained, tmp_path / "a.json", table(trained, MIXED, 0.9)), PROMPTS)
    for pause, count in ((3, 5), (11, 14)):
        state = state.replace(policy=state.policy.replace(pause=jnp.int32(pause)))
        state = loops.decode(weights, state, jnp.int32(count), plan=plan)
    nodes = np.asarray(state.nodes_bs)[:, :19]
    assert ((nodes == 1) == (np.arange(19) < 3) | ((np.arange(19) >= 5) & (np.arange(19) < 16)))[0].all()
    for b, prompt in enumerate(PROMPTS):
        written = state.tokens_bs[b, len(prompt) : state.end_b[b]].tolist()
        assert written == plain["greedy"][b][: len(written)]
    assert (np.asarray(state.accepted_bs)[:, 16:19] > 1).any(), "drafts after a pause are those of the text"
    assert state.drafter.context.length_b.tolist() == state.cache.length_b.tolist(), "before a draft nothing is pending"


@pytest.mark.parametrize(("steps", "tokens"), [(1.3, 1.0), (1.6, 1.2), (4.0, 1.1), (2.0, 1.9)])
def test_the_loss_is_bounded_if_drafting_never_pays(steps, tokens):
    """Every round commits its expected tokens; the baseline is the same number of tokens in one-token rounds."""
    now, live = make_budget(), jnp.ones(3, bool)
    choice = make_choice(tokens, tokens, steps)
    learn = jax.jit(update_budget)
    committed = time = 0.0
    probes = 0
    while committed < 1000:
        if now.pause > 0:
            committed, time = committed + int(now.pause), time + int(now.pause)
            now = now.replace(pause=jnp.int32(0))
        now = learn(now, choice, jnp.full(3, tokens), live)
        committed, time, probes = committed + tokens, time + steps, probes + 1
    assert time - committed <= budget.PATIENCE + steps - tokens + 0.01 * committed < 0.02 * committed
    assert probes > budget.PATIENCE / (steps - tokens) + 1, "it is tried again"


def test_a_debt_that_is_paid_back_ends_pauses():
    live, came = jnp.ones(3, bool), jnp.full(3, 3)
    losing, paying = (make_choice(tokens, tokens, 2.0) for tokens in (1.5, 4.0))
    now = make_budget(debt=budget.PATIENCE)
    pauses = []
    for _ in range(3):
        now = update_budget(now, losing, came, live)
        pauses.append(int(now.pause))
    assert pauses == [50, 100, 200] and int(now.last_pause) == 200
    for _ in range(2):
        now = update_budget(now, paying, came, live)
    assert int(now.pause) == int(now.last_pause) == 0 and float(now.debt) == 0


def test_reliability_is_the_ratio_of_accepted_to_expected_tokens():
    now = make_budget(reliability=0.5)
    now = update_budget(now, make_choice(5.0, 3.0, 1.0), jnp.array([2, 4, 9]), jnp.array([True, True, False]))
    assert float(now.drafted) == budget.PRIOR_TOKENS + 4 and float(now.committed) == budget.PRIOR_TOKENS / 2 + 2


def test_a_budget_keeps_its_types_in_float64():
    """They are the loop's carry."""
    with jax.enable_x64(True):
        now = make_budget()
        after = jax.eval_shape(update_budget, now, make_choice(1.5, 1.5, 1.5), jnp.ones(3, jnp.int32), jnp.ones(3, bool))
        assert [x.dtype for x in jax.tree.leaves(after)] == [x.dtype for x in jax.tree.leaves(now)]


@pytest.mark.slow
def test_nothing_recompiles_when_only_values_change(trained, tmp_path):
    path = tmp_path / "a.json"
    model = beside(trained, path, table(trained, MIXED, 0.9))
    run = lambda prompts, **how: model.generate(prompts, batch_size=4, **AUTO, **how)  # noqa: E731
    for count in (2, 3, 4):  # host arrays of 2, 3 and 4 sequences are made by different programs
        run(PROMPTS[:count], max_new_tokens=5)
    with compilations() as compiled:
        run([PROMPTS[0] * 4, *PROMPTS[:2]], max_new_tokens=33)
        run(PROMPTS[:2], max_new_tokens=7, temperature=[0.0, 1.3], top_k=[0, 5], seed=[1, 2])
        run(PROMPTS, max_new_tokens=9, drafter_temperature=0.4, stop_ids=[9, 11])
        model = beside(trained, path, table(trained, [1.1, 1.2, 1.6, 2.0], 0.8))  # reads the file again
        run(PROMPTS, max_new_tokens=9)
        assert not compiled
        programs.clear()
        run(PROMPTS, max_new_tokens=9)
        assert {"jit(read)", "jit(decode)"} <= {*compiled}, "control: these names are heard of when programs compile"


@pytest.mark.slow
def test_streaming_and_growing_caches_change_nothing(trained, plain, tmp_path, monkeypatch):
    model = beside(trained, tmp_path / "a.json", table(trained, MIXED, 0.42))
    whole = model.generate(PROMPTS[0], max_new_tokens=300, stop_ids=[], **AUTO)[0]
    assert {1} < set(whole.nodes) and whole.ids[:70] == plain["greedy"][0]
    monkeypatch.setattr("treeflash_jax.engine.model.INITIAL_ROOM", 8)
    *chunks, result = model.stream(PROMPTS[0], max_new_tokens=300, stop_ids=[], rounds_per_dispatch=5, **AUTO)
    assert programs.compiled(loops.grow) and (result.ids, result.nodes) == (whole.ids, whole.nodes) and len(chunks) > 20
    for round_index in (0, len(whole.nodes) - 1):
        assert len(whole.tree(round_index).labels) <= whole.nodes[round_index]


@pytest.mark.slow
@needs_8_devices
@pytest.mark.filterwarnings("ignore:tau is")
def test_eight_devices_answer_as_one(tmp_path):
    alone, pair = random_pair(), random_pair(make_mesh(4, 2))
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10], [11]]
    how = {"max_new_tokens": 24, "temperature": [0.0, 0.7, 1.0, 0.0], "top_p": [1.0, 0.9, 0.8, 1.0]}
    expected = [result.ids for result in alone.generate(prompts, builder="none", **how)]
    for name, seconds, step in (("on", MIXED, 0.9), ("edge", MIXED, 0.42)):
        programs.clear()
        model = beside(pair, tmp_path / f"{name}.json", table(pair, seconds, step))
        results = model.generate(prompts, **AUTO, **how)
        assert [result.ids for result in results] == expected
        assert max(results[0].nodes) > 1
        assert len(programs.compiled()) == 3
        [*_, streamed] = model.stream(prompts[0], **AUTO, max_new_tokens=24, rounds_per_dispatch=2)
        assert streamed.ids == expected[0] and len(programs.compiled()) == 3, "one layout from dispatch to dispatch"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"nodes": "many"}, "nodes 'many', expected .* or 'auto'"),
        ({"nodes": "auto", "builder": "hybrid"}, "builder 'hybrid', expected 'best-first' with nodes 'auto'"),
        ({"nodes": "auto", "builder": "chain"}, "builder 'chain', expected 'best-first' with nodes 'auto'"),
        ({"nodes": "auto", "acceptance": "block"}, "acceptance 'block'"),
        ({"nodes": "auto", "lanes": 2}, "lanes 2, expected None with nodes 'auto'"),
        ({"nodes": "auto"}, "a.json not found; nodes 'auto' needs the file that `treeflash calibrate` writes"),
    ],
)
def test_mistakes_are_one_line(trained, tmp_path, settings, words):
    model, before = beside(trained, tmp_path / "a.json"), len(programs.compiled())
    with refused(words):
        model.generate(PROMPTS[0], **settings)
    assert len(programs.compiled()) == before
