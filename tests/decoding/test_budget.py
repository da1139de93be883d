"""The budget policy: its choices, answers that do not depend on them, and the calibrations it goes by.

No test looks at a time: tables are made up, and what they make a round do is counted.
"""

import json
from dataclasses import replace

import answers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import AUTO, BUCKETS, FLAT, MIXED, PROMPTS, beside, make_runner, table
from conftest import FOLDERS
from refusals import refused

from treeflash_jax import GenerateConfig, Result, TreeFlash, load, trees
from treeflash_jax.cli import commands
from treeflash_jax.core import programs
from treeflash_jax.decoding import budget, calibration, loops
from treeflash_jax.decoding.budget import BudgetChoice, Measured, choose_bucket, update_budget
from treeflash_jax.decoding.calibration import fit_round_times
from treeflash_jax.engine.planning import make_requests

SETTINGS = {"max_new_tokens": 70, "stop_ids": []} | answers.SAMPLED


@pytest.fixture(scope="module")
def plain(trained) -> list[Result]:
    """Answers of one-token decoding."""
    return trained.generate(PROMPTS, builder="none", **SETTINGS)


def measured(seconds_cn, step, *, positions=(256,)) -> Measured:
    return Measured(
        positions_c=jnp.asarray(positions, jnp.float32), round_cn=jnp.asarray(seconds_cn, jnp.float32),
        step_c=jnp.full(len(positions), step, jnp.float32), reliability=jnp.float32(1), debt=jnp.float32(0),
    )  # fmt: skip


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
    reached = [np.exp(log_prob[live, :nodes]).sum(axis=1).mean() for nodes in BUCKETS]
    rates = (1 + reliability * (np.array(reached) - 1)) / seconds
    now = make_budget(reliability=reliability)
    choice = choose_bucket(measured([seconds], 1.0), now, drafted, jnp.asarray(live), 256, tuple(BUCKETS))
    best = int(np.argmax(rates))
    assert int(choice.index) == best and int(choice.nodes) == BUCKETS[best]
    np.testing.assert_allclose([choice.tokens / choice.steps], [rates[best]], rtol=1e-5)


# Six programs: with all buckets or a few, with and without pauses, and one that never drafts.
SLOW = ([1.0, 2.0, 4.0, 8.0], 0.9, {2}), (MIXED, 0.9, {4, 8}), (MIXED, 0.42, {1, 4})
CHOICES = [(FLAT, 1.0, {16}), (FLAT, 0.25, {1, 16}), (FLAT, 0.2, {1})]
CHOICES += [pytest.param(*choice, marks=pytest.mark.slow) for choice in SLOW]


@pytest.mark.parametrize(("seconds", "step", "taken"), CHOICES)
def test_answers_are_those_of_one_token_decoding_for_every_choice(trained, plain, tmp_path, seconds, step, taken):
    model = beside(trained, tmp_path / "a.json", table(trained, seconds, step))
    results = answers.drafted_as_plain(model, PROMPTS, AUTO, plain=plain, **SETTINGS)
    assert taken <= {n for result in results for n in result.nodes} <= {1, *BUCKETS}
    for result in results:
        assert all(length <= count for length, count in zip(result.accept_lengths, result.nodes, strict=True))


def started(model: TreeFlash, prompts, capacity: int = 256, **settings) -> tuple:
    """Returns plan, weights and state of rounds that choose, after the prompts."""
    runner, batch = make_runner(model, prompts, capacity, **AUTO, **settings)
    return runner.plan, runner.weights, runner.start(batch)


def test_one_token_decoding_keeps_the_requested_settings(trained, tmp_path):
    """Not by the defaults: its speed was measured with these settings."""
    config = GenerateConfig(**AUTO, attention="xla", log_probs=True, max_new_tokens=199)  # no defaults
    model = beside(trained, tmp_path / "budget.json", table(trained, FLAT, 0.2, attention="xla"))
    plan = model.make_runner(config, make_requests([[3]], config, model.verifier)).plan
    assert plan == model.plan(replace(config, builder="none", nodes=None)) and plan.attention == "xla" and plan.log_probs


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "taken"), [("xla", -1), ("streamed", 0)])
def test_the_bucket_depends_on_the_positions_that_attention_reads(trained, tmp_path, attention, taken):
    """A few positions of a cache of 512, or all of them."""
    entry = table(trained, MIXED, 0.9, attention=attention)
    plan, weights, state = started(beside(trained, tmp_path / "a.json", entry), PROMPTS, 512, attention=attention)
    nodes = plan.policy.nodes
    few_n = np.arange(len(nodes)) * 8 + 1
    times = measured([few_n, few_n[::-1]], 9.0, positions=(64, 512))
    state = loops.decode(weights.replace(policy=times), state, jnp.int32(2), plan=plan)
    assert state.nodes_bs[:, :2].tolist() == [[nodes[taken]] * 2] * len(PROMPTS)


@pytest.mark.slow
@pytest.mark.parametrize("paused", [1, 5, 8, 19])  # eight tokens may be pending
def test_after_a_pause_the_drafter_has_seen_all_it_would_have_seen(trained, tmp_path, paused):
    plan, weights, state = started(beside(trained, tmp_path / "a.json", table(trained, MIXED, 0.9)), PROMPTS[:2])
    assert state.policy.features_bpj.shape[1] == plan.path_length == 8
    every_round = replace(plan, num_nodes=1, policy=None)
    unpaused = jax.tree.map(jnp.copy, state.replace(policy=None, nodes_bs=None))
    expected = loops.decode(weights, unpaused, jnp.int32(paused), plan=every_round)
    state = state.replace(policy=state.policy.replace(pause=jnp.int32(paused)))
    state = loops.decode(weights, state, jnp.int32(paused), plan=plan)
    assert state.rounds_b.tolist() == [paused] * 2 and int(state.policy.pause) == 0
    assert state.drafter.context.length_b.tolist() != expected.drafter.context.length_b.tolist()
    state = loops.catch_up(weights, state, plan=plan)
    assert state.policy.pending_b.tolist() == [0, 0]
    ours, theirs = state.drafter.context, expected.drafter.context
    assert ours.length_b.tolist() == theirs.length_b.tolist() == state.cache.length_b.tolist()
    answers.assert_same_positions(ours, theirs, ours.length_b.tolist(), atol=1e-5)
    drafts = [loops.draft(trained.weights, each, replace(plan, policy=None)) for each in (state, expected)]
    np.testing.assert_array_equal(drafts[0].tokens_bn, drafts[1].tokens_bn)


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
    assert float(now.expected) == budget.PRIOR_TOKENS + 4 and float(now.committed) == budget.PRIOR_TOKENS / 2 + 2


@pytest.mark.slow
def test_streaming_and_growing_caches_change_nothing(trained, plain, tmp_path, monkeypatch):
    model = beside(trained, tmp_path / "a.json", table(trained, MIXED, 0.42))
    whole = model.generate(PROMPTS[0], max_new_tokens=300, stop_ids=[], **AUTO)[0]
    assert {1} < set(whole.nodes) and whole.ids[:70] == plain[0].ids
    monkeypatch.setattr("treeflash_jax.engine.batching.INITIAL_ROOM", 8)
    *chunks, result = model.stream(PROMPTS[0], max_new_tokens=300, stop_ids=[], rounds_per_dispatch=3, **AUTO)
    assert programs.compiled(loops.grow) and (result.ids, result.nodes) == (whole.ids, whole.nodes) and len(chunks) > 20
    for round_index in (0, len(whole.nodes) - 1):
        assert len(whole.tree(round_index).labels) <= whole.nodes[round_index]


def test_a_missing_calibration_is_refused_before_any_compute(trained, tmp_path):
    model, before = beside(trained, tmp_path / "a.json"), len(programs.compiled())
    words = "a.json not found; nodes 'auto' needs the file that `treeflash calibrate` writes"
    refused(lambda: model.generate(PROMPTS[0], nodes="auto"), words)
    assert len(programs.compiled()) == before


# Calibrations: fits of round times, the buckets of a call, identities, files, and the command that writes them


def test_times_of_a_mixture_of_experts_may_rise_most_at_first(trained):
    """They follow distinct experts, 128 (1 - (1 - 8 / 128)^n), which a convex fit would make a straight line."""
    nodes = (2, 4, 8, 16, 32, 64)
    seconds = [2.5 + 57 * (1 - (1 - 8 / 128) ** n) for n in nodes]
    np.testing.assert_allclose(fit_round_times(nodes, seconds, is_convex=False), seconds, rtol=1e-6)
    assert fit_round_times(nodes, seconds)[1] < 0.9 * seconds[1]
    noisy = np.array([1.0, 0.9, 2.0, 1.9])
    fitted = fit_round_times((2, 4, 8, 16), noisy, is_convex=False)
    assert np.all(np.diff(fitted) >= 0) and np.all(np.abs(fitted - noisy) <= 0.06)
    entry = replace(table(trained, seconds, 6.0, tau=[1.7, 2.3, 2.6, 2.8, 2.9, 3.0], nodes=list(nodes)), sparse=True)
    decision = entry.decide(1, 256, [0.0])
    assert decision.nodes[0] == 2
    np.testing.assert_allclose(decision.measured.round_cn[0, 0], seconds[0], rtol=1e-6)


def test_no_convex_increasing_function_is_nearer():
    nodes, seconds = [4, 8, 16, 32, 64], np.array([3.0, 2.6, 3.1, 3.0, 7.0])
    error = lambda y: np.sum((y / seconds - 1) ** 2)  # noqa: E731
    fitted, rng, compared = fit_round_times(nodes, seconds), np.random.default_rng(0), 0
    slopes = np.diff(fitted) / np.diff(nodes)
    assert (slopes >= -1e-9).all() and (np.diff(slopes) >= -1e-9).all()
    convex = [1.0, 1.2, 1.7, 3.0, 7.0]
    np.testing.assert_allclose(fit_round_times(nodes, convex), convex, rtol=1e-6)
    for size in (1e-3, 1e-2, 0.1, 1.0):
        for _ in range(500):
            other = fitted + size * rng.normal(size=5)
            slopes = np.diff(other) / np.diff(nodes)
            if (slopes >= 0).all() and (np.diff(slopes) >= 0).all():
                assert error(other) >= error(fitted)
                compared += 1
    assert compared > 100


def test_a_decision_by_hand(trained):
    entry = replace(
        table(trained, [1.0, 1.2, 1.5, 3.0], 1.0, tau=[1.5, 2.4, 3.3, 3.6]),
        batch=[1, 3], positions=[256, 512],
        round_seconds=[[[1.0, 1.2, 1.5, 3.0]] * 2, [[3.0, 3.2, 3.5, 5.0]] * 2],
        tree_seconds=[[[0.1, 0.2, 0.4, 0.8]] * 2] * 2,
        step_seconds=[[1.0, 1.5], [2.0, 2.5]],
    )  # fmt: skip
    decision = entry.decide(2, 384, [0.0])
    fitted = [fit_round_times(BUCKETS, y) for y in ([1.0, 1.2, 1.5, 3.0], [3.0, 3.2, 3.5, 5.0])]
    round_n = np.mean(fitted, axis=0) - 0.8 + 0.4
    assert decision.nodes == (2, 4, 8), "rounds of 16 take too long; their trees are not built"
    np.testing.assert_allclose(decision.measured.round_cn, [round_n[:3]] * 2)
    np.testing.assert_allclose(decision.measured.step_c, [1.5, 2.0])
    assert decision.speedup == pytest.approx(max(np.array([1.5, 2.4, 3.3]) * 1.75 / round_n[:3]))
    slow = replace(entry, step_seconds=[[0.2, 0.3], [0.4, 0.5]]).decide(2, 384, [0.0])
    assert slow.nodes == () and slow.speedup < calibration.MIN_SPEEDUP


@pytest.mark.parametrize("changed", ["pair", "device", "mesh", "dtype", "jax", "head", "block_size", "candidates", "new"])
def test_a_stale_calibration_is_refused(trained, tmp_path, changed):
    path = tmp_path / "a.json"
    model, before = beside(trained, path, table(trained, MIXED, 0.9, **{changed: "other"})), len(programs.compiled())
    refused(lambda: model.generate([3, 4, 5], **AUTO), f"got a calibration for {changed} 'other', expected")
    assert len(programs.compiled()) == before
    calibration.write(path, table(trained, MIXED, 0.9))
    assert model.calibration(model.plan(GenerateConfig(**AUTO))).identity.get(changed) != "other"
    assert len(calibration.read(path)) == 2, "the other one is kept"


def test_a_lora_in_any_matrix_makes_another_pair_and_the_form_of_the_weights_does_not(trained):
    plan = trained.plan(GenerateConfig(builder="best-first"))
    pair = calibration.pair_digest(trained.weights, plan)
    leaves, structure = jax.tree.flatten(trained.weights)
    for i, leaf in enumerate(leaves):
        if leaf.ndim > 1:
            up, down = (jax.random.normal(jax.random.key(0), shape) for shape in (leaf.shape[:1], leaf.shape[1:]))
            low_rank = 0.05 * jnp.std(leaf) * jnp.tensordot(up, down, axes=0)
            merged = structure.unflatten([*leaves[:i], leaf + low_rank, *leaves[i + 1 :]])
            assert calibration.pair_digest(merged, plan) != pair
    for form in ({"dtype": jnp.bfloat16}, {"quantize": "int8"}, {"dtype": jnp.bfloat16, "quantize": "int8"}):
        other = load(**FOLDERS, **form)
        assert calibration.pair_digest(other.weights, plan) == pair


@pytest.mark.slow
def test_calibrate_writes_what_generate_reads(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sizes = "--candidates 4 --children 4 --block-size 4".split()
    words = "calibrate --verifier tiny --batch 1 2 --context 20 --nodes 2 4 --limit 2 --max-new-tokens 6 --repeats 2"
    assert commands.main([*words.split(), *sizes]) == 0
    printed, steps = capsys.readouterr()
    assert steps.startswith("[1/6] answering 2 prompts at T 0\n") and "[6/6] timing them at batch 2" in steps
    assert "batch 2, 256 positions read: step" in printed and "T 1: tau by nodes 2:" in printed
    [entry] = calibration.read(tmp_path / "treeflash" / calibration.FILE)
    assert entry.nodes == [2, 4] and entry.batch == [1, 2] and entry.positions == [256] and entry.temperatures == [0.0, 1.0]
    assert np.shape(entry.round_seconds) == np.shape(entry.tree_seconds) == (2, 1, 2)
    assert (np.array(entry.round_seconds) > np.array(entry.tree_seconds)).all() and np.min(entry.step_seconds) > 0
    assert all(1 <= tau[0] <= tau[1] <= 4 for tau in entry.tau)
    prompt = ["--verifier", "tiny", "--prompt-ids", "5 6 7", "--max-new-tokens", "5", "--json", *sizes]
    ids = []
    for draft in (["--nodes", "auto"], ["--builder", "none"]):
        assert commands.main(["generate", *draft, *prompt]) == 0
        ids.append(json.loads(capsys.readouterr().out)["ids"])
    assert ids[0] == ids[1]
    assert commands.main(["generate", "--nodes", "auto", *prompt, "--candidates", "5"]) == 2
    assert "got a calibration for candidates 4, expected 5" in capsys.readouterr().err
