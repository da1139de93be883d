"""Rounds that choose their own nodes: the choice, what it must not change, and the calibration it goes by.

No test looks at a time: tables are made up, and what they make a round do is counted.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import RANDOM_DRAFTER, RANDOM_MODEL, random_pair
from hypothesis import given, settings
from hypothesis import strategies as st

from treeflash_jax import GenerateConfig, TreeFlash, budget, calibration, cli, load, make_mesh, rounds, tree
from treeflash_jax import decode as core
from treeflash_jax.calibration import Calibration, fit_round_times
from treeflash_jax.options import rows_of

BUCKETS = [2, 4, 8, 16]
AUTO = {"nodes": "auto", "candidates": 8, "children": 8}
PROMPTS = [[3, 4, 5, 17, 29], [7, 8], [100, 3, 50, 60, 61, 62, 63], [9]]
SAMPLED = {"temperature": [0.0, 0.7, 1.0, 0.0], "top_p": [1.0, 0.9, 1.0, 1.0], "seed": [1, 2, 3, 4]}
FLAT, STEEP, MIXED = [1.0] * 4, [1.0, 2.0, 4.0, 8.0], [1.0, 1.2, 1.5, 2.1]


def table(model, seconds, step, *, tau=(1.8, 2.5, 3.2, 3.8), nodes=BUCKETS, **changes) -> Calibration:
    """A calibration that was never measured."""
    plan = model.plan(GenerateConfig(builder="best-first", candidates=AUTO["candidates"], children=AUTO["children"]))
    return Calibration(
        identity=calibration.identity_of(model.verifier, model.weights, plan, model.mesh) | changes,
        nodes=list(nodes),
        batch=[1],
        slots=[256],
        round_seconds=[[list(seconds)]],
        tree_seconds=[[[0.0] * len(nodes)]],
        step_seconds=[[step]],
        temperatures=[0.0, 1.0],
        tau=[list(tau)] * 2,
        reliability=[1.0, 1.0],
    )


def beside(model: TreeFlash, path, *entries: Calibration) -> TreeFlash:
    """The same model, which reads these entries."""
    for entry in entries:
        calibration.write(path, entry)
    model = TreeFlash(model.verifier, model.weights, drafter=model.drafter, mesh=model.mesh, budget=path)
    return model


@pytest.fixture(scope="module")
def plain(trained):
    return {
        name: [result.ids for result in trained.generate(PROMPTS, method="ar", max_new_tokens=70, stop_ids=[], **how)]
        for name, how in (("greedy", {}), ("sampled", SAMPLED))
    }


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.1, 100), min_size=3, max_size=8))
def test_fitted_times_are_convex_and_increasing(seconds):
    nodes = [2**k for k in range(1, len(seconds) + 1)]
    fitted = fit_round_times(nodes, seconds)
    slopes = np.diff(fitted) / np.diff(nodes)
    assert (slopes >= -1e-9).all() and (np.diff(slopes) >= -1e-9).all() and (fitted > 0).all()


@settings(max_examples=50, deadline=None)
@given(st.floats(0.1, 10), st.lists(st.floats(0, 1), min_size=3, max_size=7))
def test_a_convex_table_is_its_own_fit(first, slopes):
    nodes = [2**k for k in range(1, len(slopes) + 2)]
    seconds = first + np.concatenate([[0], np.cumsum(np.diff(nodes) * np.sort(slopes))])
    np.testing.assert_allclose(fit_round_times(nodes, seconds), seconds, rtol=1e-6)


def test_no_convex_increasing_function_is_nearer():
    nodes, seconds = [4, 8, 16, 32, 64], np.array([3.0, 2.6, 3.1, 3.0, 7.0])
    error = lambda y: np.sum((y / seconds - 1) ** 2)  # noqa: E731
    fitted, rng = fit_round_times(nodes, seconds), np.random.default_rng(0)
    for size in (1e-3, 1e-2, 0.1, 1.0):
        for _ in range(500):
            other = fitted + size * rng.normal(size=5)
            slopes = np.diff(other) / np.diff(nodes)
            if (slopes >= 0).all() and (np.diff(slopes) >= 0).all():
                assert error(other) >= error(fitted)


def budget_of(seconds, step, *, reliability=1.0, debt=0.0, slots=(256,)) -> budget.Budget:
    times = budget.RoundTimes(
        slots_c=jnp.asarray(slots, jnp.float32),
        round_cn=jnp.asarray(seconds, jnp.float32).reshape(len(slots), -1),
        step_c=jnp.broadcast_to(jnp.float32(step), (len(slots),)),
    )
    sizes = {"batch": 3, "capacity": 256, "pending": 4, "features": 2, "dtype": jnp.float32}
    return budget.start(times, reliability=reliability, debt=debt, **sizes)


@pytest.mark.parametrize("reliability", [0.5, 1.0, 1.4])
@pytest.mark.parametrize("seed", range(6))
def test_the_choice_is_that_of_trying_every_bucket(seed, reliability):
    rng = np.random.default_rng(seed)
    log_prob = np.sort(-rng.exponential(2, (3, 16)).astype(np.float32))[:, ::-1].copy()
    log_prob[:, 0] = 0
    log_prob[1, 9:] = -np.inf
    drafted = tree.root_only(jnp.zeros(3, jnp.int32)).replace(
        log_prob_bn=jnp.asarray(log_prob), valid_bn=jnp.asarray(np.isfinite(log_prob))
    )
    live = np.array([True, True, seed % 2 == 0])
    seconds = np.cumsum(rng.uniform(0.05, 1.0, 4))
    rates = []
    for nodes, time in zip(BUCKETS, seconds, strict=True):
        phi = np.mean([np.exp(log_prob[b, :nodes]).sum() for b in range(3) if live[b]])
        rates.append((1 + reliability * (phi - 1)) / time)
    choice = budget.choose(budget_of(seconds, 1.0, reliability=reliability), drafted, jnp.asarray(live), 256, BUCKETS)
    best = int(np.argmax(rates))
    assert int(choice.index) == best and int(choice.nodes) == BUCKETS[best]
    np.testing.assert_allclose([choice.tokens / choice.steps], [rates[best]], rtol=1e-5)


def test_times_lie_on_the_line_between_cache_sizes_and_stay_at_the_ends():
    times = budget_of([[1, 2], [3, 6]], 1.0, slots=(256, 512)).times
    for slots, expected in ((128, [1, 2]), (256, [1, 2]), (320, [1.5, 3]), (512, [3, 6]), (4096, [3, 6])):
        np.testing.assert_allclose(times.at(slots)[0], expected)


def test_a_cut_tree_is_the_smaller_tree(trained):
    config = GenerateConfig(nodes=16, candidates=8, children=8, max_new_tokens=8)
    plan = trained.plan(config)
    inputs = trained._inputs(rows_of(PROMPTS, config, trained.verifier), 4, 256, config)
    state = core.prefill(trained.weights, *inputs, plan=plan.for_prefill())
    whole = core.draft(trained.weights, state, plan)
    for nodes in (2, 5, 8):
        own = core.draft(trained.weights, state, replace(plan, num_nodes=nodes))
        jax.tree.map(np.testing.assert_array_equal, tree.first(whole, nodes), own)


@pytest.mark.parametrize(
    ("seconds", "step", "taken"),
    [
        (FLAT, 1.0, {16}),
        (STEEP, 0.9, {2}),
        (MIXED, 0.9, {2, 4, 8, 16}),
        (FLAT, 0.3, {1, 16}),  # a round takes as long as 3.3 steps: on the edge, with pauses
        (MIXED, 0.42, {1, 2, 4, 8}),
    ],
)
@pytest.mark.parametrize("how", ["greedy", "sampled"])
def test_whatever_is_chosen_the_answer_is_that_of_one_token_decoding(trained, plain, tmp_path, seconds, step, taken, how):
    model = beside(trained, tmp_path / "a.json", table(trained, seconds, step))
    results = model.generate(PROMPTS, max_new_tokens=70, stop_ids=[], **AUTO, **(SAMPLED if how == "sampled" else {}))
    assert [result.ids for result in results] == plain[how]
    nodes = {n for result in results for n in result.nodes}
    assert nodes <= {1, *BUCKETS}
    if how == "greedy":
        assert nodes >= taken, nodes
    for result in results:
        assert len(result.nodes) == len(result.accept_lengths) and 1 + sum(result.accept_lengths) >= 70
        assert all(length <= count for length, count in zip(result.accept_lengths, result.nodes, strict=True))
