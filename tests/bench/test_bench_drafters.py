"""Drafters side by side: distances by depth against a plain loop, and the command from models to files."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeflash_jax as tf
from treeflash_jax import trees
from treeflash_jax.bench import drafters
from treeflash_jax.bench.depths import distances
from treeflash_jax.cli.commands import main


def a_table(size: int, depths: int, kept: int):
    """Random distributions after every token at every depth, with the `kept` likeliest tokens, and all of them."""
    q_bimv = np.random.default_rng(0).dirichlet(np.ones(size), (2, depths, size)).astype(np.float32)
    log_q, tokens = jax.lax.top_k(jnp.log(q_bimv), kept)
    return trees.TransitionTable(tokens, log_q, tokens), q_bimv


@pytest.mark.parametrize("kept", [6, 4])
def test_distances_are_those_along_the_path(kept):
    table, q_bimv = a_table(6, 3, kept)
    logits_bpv = np.random.default_rng(1).normal(size=(2, 4, 6)).astype(np.float32)
    listed_bp = [[int(table.tokens_bimc[b, 0, 0, 1])] for b in range(2)]
    for b in range(2):
        for depth in (1, 2):
            listed_bp[b].append(int(table.tokens_bimc[b, depth, listed_bp[b][-1], 2]))
    found = np.asarray(jax.jit(distances)(table, logits_bpv, jnp.asarray([[*row, 0] for row in listed_bp])))
    for b in range(2):
        row = 0
        for depth in range(3):
            p, q = np.asarray(jax.nn.softmax(logits_bpv[b, depth])), q_bimv[b, depth, row]
            seen = np.isin(np.arange(6), table.tokens_bimc[b, depth, row])
            expected = (np.abs(p - q)[seen].sum() + abs(p[~seen].sum() - q[~seen].sum())) / 2
            assert abs(found[b, depth] - expected) < 1e-5
            assert found[b, depth] <= np.abs(p - q).sum() / 2 + 1e-6
            row = listed_bp[b][depth]


@pytest.mark.slow
def test_the_command_compares_drafters(short, tmp_path, capsys, monkeypatch):
    prompts, out, plot = (tmp_path / name for name in ("prompts.jsonl", "found.json", "found.png"))
    prompts.write_text(json.dumps({"id": 1, "turns": ["Ada has 3 pens and buys 5 more. How many pens has she?"]}) + "\n")
    words = ["bench", "drafters", "--verifier", str(short), "--drafter", f"itself={short}", "ngram"]
    words += ["--prompts", str(prompts), "--nodes", "4"]
    words += ["--max-new-tokens", "12", "--repeats", "1", "--context", "30", "--out", str(out), "--plot", str(plot)]
    out.write_text('{"systems": []}')  # its own file is replaced
    kept, measured = [], drafters.distances_by_depth
    monkeypatch.setattr(
        drafters, "distances_by_depth", lambda *given: kept.append(json.loads(out.read_text())) or measured(*given)
    )
    assert main(words) == 0
    assert "ngram" in capsys.readouterr().out and plot.stat().st_size > 1000
    found = json.loads(out.read_text())
    systems = {(s["drafter"], s["way"], s["nodes"]): s for s in found["systems"]}
    assert {("none", "one token", None), ("itself", "tree", 4), ("ngram", "tree", 4)} <= {*systems}
    assert all(system["identical"] == system["compared"] == 1 for system in systems.values())
    before = kept[0]["systems"]
    assert [s["tau"] for s in before] == [s["tau"] for s in found["systems"]], "a run that is stopped keeps it"
    assert not any(system["phases_ms"] for system in before) and before[0]["prompts"] == 1
    own = systems["itself", "tree", 4]
    assert own["tau"] > 1 and own["distance_by_depth"]["rounds"][0] > 1
    assert max(own["distance_by_depth"]["distance"]) < 1e-3, "of a model from itself"
    assert {"draft", "tree", "verify", "accept", "commit", "round", "step"} == {*own["phases_ms"]}
    out.write_text("mine")
    assert main(words) == 2 and out.read_text() == "mine"


def test_drafters_with_a_head_are_shown_without_it_too(tiny):
    systems = drafters.make_systems({"shipped": tiny}, tf.GenerateConfig(), [4, 8])
    ways = [(way, nodes, system.config.head) for (_, way, nodes), system in systems.items() if nodes]
    assert [way for way in ways if way[0] == "tree, no head"] == [("tree, no head", n, "marginal") for n in (4, 8)]
    assert [way[:2] for way in ways if way[2] is None] == [("chain", tiny.drafter.block_size), ("tree", 4), ("tree", 8)]


def test_mistakes_are_one_line(tmp_path, capsys):
    for words, says in (
        (["--nodes", "1"], "--nodes 1, expected at least 2"),
        (["--context", "0"], "--context: got context '0', expected at least 1"),
        (["--drafter", "a=tiny", "a=tiny"], "two drafters called 'a'"),
    ):
        try:
            status = main(["bench", "drafters", *words, "--out", str(tmp_path / "x.json")])
        except SystemExit as stop:
            status = stop.code
        assert status == 2
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1 and not (tmp_path / "x.json").exists()
