"""Calibrations: fits of round times, the buckets of a call, identities, files, and the command that writes them.

No test looks at a time: tables are made up.
"""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import refused
from budgets import AUTO, BUCKETS, MIXED, beside, table
from conftest import DATA

from treeflash_jax import GenerateConfig, load
from treeflash_jax.cli import commands
from treeflash_jax.core import programs
from treeflash_jax.decoding import calibration
from treeflash_jax.decoding.calibration import fit_round_times


def test_times_of_a_mixture_of_experts_may_rise_most_at_first():
    """They follow distinct experts, 128 (1 - (1 - 8 / 128)^n), which a convex fit would make a straight line."""
    nodes = (2, 4, 8, 16, 32, 64)
    seconds = [2.5 + 57 * (1 - (1 - 8 / 128) ** n) for n in nodes]
    np.testing.assert_allclose(fit_round_times(nodes, seconds, is_convex=False), seconds, rtol=1e-6)
    assert fit_round_times(nodes, seconds)[1] < 0.9 * seconds[1]
    noisy = np.array([1.0, 0.9, 2.0, 1.9])
    fitted = fit_round_times((2, 4, 8, 16), noisy, is_convex=False)
    assert np.all(np.diff(fitted) >= 0) and np.all(np.abs(fitted - noisy) <= 0.06)
    tau = [1.7, 2.3, 2.6, 2.8, 2.9, 3.0]
    tables = {"round_seconds": [[seconds]], "tree_seconds": [[[0.0] * 6]], "step_seconds": [[6.0]], "tau": [tau]}
    sizes = {"identity": {}, "nodes": list(nodes), "batch": [1], "positions": [256], "temperatures": [0.0]}
    entry = calibration.Calibration(**sizes, **tables, reliability=[1.0], sparse=True)
    assert entry.decide(1, 256, [0.0]).nodes[0] == 2
    np.testing.assert_allclose(entry.decide(1, 256, [0.0]).measured.round_cn[0, 0], seconds[0], rtol=1e-6)


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
    assert decision.measured.debt == 0
    slow = replace(entry, step_seconds=[[0.2, 0.3], [0.4, 0.5]]).decide(2, 384, [0.0])
    assert slow.nodes == () and slow.speedup < calibration.MIN_SPEEDUP


@pytest.mark.parametrize("changed", ["pair", "device", "mesh", "dtype", "jax", "head", "block_size", "candidates"])
def test_a_stale_calibration_is_refused(trained, tmp_path, changed):
    path = tmp_path / "a.json"
    model, before = beside(trained, path, table(trained, MIXED, 0.9, **{changed: "other"})), len(programs.compiled())
    with refused(f"got a calibration for {changed} 'other', expected"):
        model.generate([3, 4, 5], **AUTO)
    assert len(programs.compiled()) == before
    calibration.write(path, table(trained, MIXED, 0.9))
    assert model.calibration(model.plan(GenerateConfig(**AUTO))).identity[changed] != "other"
    assert len(calibration.read(path)) == 2, "the other one is kept"


def test_weights_of_another_drafter_are_another_pair(trained):
    plan = trained.plan(GenerateConfig(builder="best-first"))
    weights = trained.weights.replace(drafter=jax.tree.map(lambda x: x + 1, trained.weights.drafter))
    ours, other = (calibration.make_identity(trained.verifier, w, plan, None) for w in (trained.weights, weights))
    assert [name for name in ours if ours[name] != other[name]] == ["pair"]


def test_a_lora_in_any_matrix_makes_another_pair_and_the_form_of_the_weights_does_not(trained):
    plan = trained.plan(GenerateConfig(builder="best-first"))
    pair = calibration.pair_digest(trained.verifier, trained.weights, plan)
    leaves, structure = jax.tree.flatten(trained.weights)
    matrices = [i for i, leaf in enumerate(leaves) if leaf.ndim > 1]
    for i in matrices:
        down, up = (jax.random.normal(jax.random.key(k), leaves[i].shape[:1] if k else leaves[i].shape[1:]) for k in (0, 1))
        low_rank = 0.05 * jnp.std(leaves[i]) * up.reshape(-1, *[1] * down.ndim) * down
        merged = structure.unflatten([*leaves[:i], leaves[i] + low_rank, *leaves[i + 1 :]])
        assert calibration.pair_digest(trained.verifier, merged, plan) != pair
    folder = DATA / "conformance" / "b_trained"
    for form in ({"dtype": jnp.bfloat16}, {"quantize": "int8"}, {"dtype": jnp.bfloat16, "quantize": "int8"}):
        other = load(verifier=folder / "verifier", drafter=folder / "drafter", **form)
        assert calibration.pair_digest(other.verifier, other.weights, plan) == pair


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"entries": [{"nodes": 1}]}'])
def test_a_damaged_file_is_one_line(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="got no calibration"):
        calibration.read(path)


def test_the_default_path_is_the_folder_of_a_local_drafter(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert calibration.default_path(tmp_path) == tmp_path / calibration.FILE
    for drafter in ("owner/drafter", None):
        assert calibration.default_path(drafter) == tmp_path / "cache/treeflash" / calibration.FILE


@pytest.mark.slow
def test_calibrate_writes_what_generate_reads(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sizes = "--candidates 4 --children 4 --block-size 4".split()
    words = "calibrate --verifier tiny --batch 1 2 --context 20 --nodes 2 4 --limit 2 --max-new-tokens 6 --repeats 2"
    assert commands.main([*words.split(), *sizes]) == 0
    printed, steps = capsys.readouterr()
    assert steps.startswith("[1/6] answering 2 prompts at T 0\n") and "[6/6] timing them at batch 2" in steps
    [entry] = calibration.read(tmp_path / "treeflash" / calibration.FILE)
    assert entry.nodes == [2, 4] and entry.batch == [1, 2] and entry.positions == [256] and entry.temperatures == [0.0, 1.0]
    assert np.shape(entry.round_seconds) == np.shape(entry.tree_seconds) == (2, 1, 2)
    assert (np.array(entry.round_seconds) > np.array(entry.tree_seconds)).all() and np.min(entry.step_seconds) > 0
    for tau in entry.tau:
        assert 1 <= tau[0] <= tau[1] <= 4
    assert "batch 2, 256 positions read: step" in printed and "T 1: tau by nodes 2:" in printed
    prompt = ["--verifier", "tiny", "--prompt-ids", "5 6 7", "--max-new-tokens", "5", "--json", *sizes]
    assert commands.main(["generate", "--nodes", "auto", *prompt]) == 0
    auto = json.loads(capsys.readouterr().out)
    assert commands.main(["generate", "--builder", "none", *prompt]) == 0
    assert auto["ids"] == json.loads(capsys.readouterr().out)["ids"]
    assert commands.main(["generate", "--nodes", "auto", *prompt, "--candidates", "5"]) == 2
    assert "got a calibration for candidates 4, expected 5" in capsys.readouterr().err
