"""`bench latency`: the timed phases are a round's; output, files and errors.

No test looks at a time: on a busy machine times are noise.
"""

import argparse
import json
import re
import socket
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import make_pair, prefilled
from conftest import DATA, PAIR, RANDOM_DRAFTER, RANDOM_MODEL, needs_8_devices, random_pair
from jax.sharding import PartitionSpec
from model_files import assert_same
from own_calls import LAYERS
from refusals import mistake, refused

from treeflash_jax import GenerateConfig, TreeFlash, make_mesh
from treeflash_jax.bench import latency, phases, shapes
from treeflash_jax.cli import commands
from treeflash_jax.core.parameters import is_spec
from treeflash_jax.decoding import rounds
from treeflash_jax.decoding.state import Weights
from treeflash_jax.drafters.language_model_drafter import LanguageModelDrafter
from treeflash_jax.models import decoder

SMALL = ["--shape", str(PAIR / "verifier" / "config.json"), "--drafter-shape", str(PAIR / "drafter")]
SMALL += ["--candidates", "4", "--children", "4"]
TINY = ["--verifier", "tiny"]
SHARED, OF_A_TREE = ("prefill", "step"), ("draft", "tree", "verify", "accept", "commit", "round")
KINDS = [(phase, None) for phase in SHARED] + [(phase, nodes) for nodes in (3, 8) for phase in OF_A_TREE]


def make_plans(model, *nodes, **settings):
    settings |= {"candidates": 4, "children": 4}
    return [model.plan(GenerateConfig(nodes=n, **settings)) for n in nodes]


@pytest.fixture(scope="module")
def bench(trained) -> phases.Bench:
    """A pair that accepts several tokens a round, so that a wrong tree commits something else."""
    return phases.Bench(trained, make_plans(trained, 3, 8, attention="xla"), batch=2, context=40)


def test_a_draft_is_timed_without_copying_what_it_passes_on():
    """A drafter that runs once per level passes its weights on to the tree."""
    pair = make_pair(LAYERS, LanguageModelDrafter(layers=LAYERS))
    plan, state = prefilled(pair, [[1, 2, 3]], nodes=4, children=4)
    computed = phases.compute_draft(pair.weights, state, plan=plan)
    assert sum(x.nbytes for x in computed) < 500 < pair.weights.drafter["embed"].nbytes
    expected = jax.jit(rounds.draft_tree, static_argnums=2)(pair.weights, state, plan)
    assert_same(phases.compute_tree(pair.weights, state, computed, plan=plan), expected)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [3, 8])
def test_the_phases_one_by_one_do_what_a_round_does(bench, nodes):
    """The commit that is timed has tree, logits and path from the phases before it; a round of `decode` does the same."""
    at = {(phase.name, phase.nodes): phase for phase in bench.phases}
    alone, whole = (at[name, nodes].make_enqueue(1)() for name in ("commit", "round"))
    assert alone.end_b.tolist() == [41 + n for n in whole.accepted_bs[:, 0].tolist()] and max(alone.end_b) > 42
    for name in ("cache", "drafter", "tokens_bs", "end_b", "rounds_b"):
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-4), getattr(alone, name), getattr(whole, name))


@pytest.mark.slow
def test_samples_leave_the_state_as_it_was(bench):
    [rows] = phases.measure([bench], repeats=3)
    assert [(row["phase"], row["nodes"]) for row in rows] == KINDS
    for row in rows:
        assert row["samples"] == 3 and 0 < row["low_ms"] <= row["ms"] <= row["high_ms"]
        assert 1 <= row["calls"] <= (phases.ROUNDS if row["phase"] in ("step", "commit", "round") else phases.CALLS)
    state = bench.state
    assert state.end_b.tolist() == [41, 41] and state.cache.length_b.tolist() == [40, 40]


@pytest.mark.slow
def test_benches_take_their_samples_in_turns(bench, monkeypatch):
    sampled = []
    monkeypatch.setattr(phases.Phase, "choose_calls", lambda self: None)
    monkeypatch.setattr(phases.Phase, "summarise", lambda self: None)
    monkeypatch.setattr(phases.Phase, "sample", lambda self: sampled.append(self.name))
    phases.measure([bench, bench], repeats=2)
    assert len(sampled) == 4 * len(KINDS) and sampled[0] != sampled[2 * len(KINDS)]
    assert sampled[: 2 * len(KINDS)] == [name for name, _ in KINDS] * 2


@pytest.mark.slow
@needs_8_devices
def test_on_a_mesh_every_phase_takes_the_layout_that_the_one_before_gives():
    model = random_pair(make_mesh(2, 2))
    bench = phases.Bench(model, make_plans(model, 8), batch=2, context=40)
    assert [row["phase"] for row in phases.measure([bench], repeats=2)[0]] == [*SHARED, *OF_A_TREE]
    assert all(x.sharding.spec[:3] == ("data", None, "model") for x in jax.tree.leaves(bench.state.cache.states))


@needs_8_devices
def test_random_weights_are_finite_and_differ_by_layer():
    model = shapes.random_pair(RANDOM_MODEL, RANDOM_DRAFTER, jnp.bfloat16, make_mesh(1, 2))
    for array in jax.tree.leaves(model.weights):
        values = np.asarray(array)
        assert values.dtype == jnp.bfloat16 and np.isfinite(values).all() and values.any()
    first, second = (model.weights.verifier["groups"][0][i]["gate"] for i in (0, 1))
    assert first.sharding.spec == PartitionSpec("model", None)
    assert not np.array_equal(first, second)


# The command, with measurements that are made up; `extending.goes_through_everything` runs it with real ones.


@pytest.fixture
def made_up(monkeypatch):
    """Phases of 1 ms and rounds of nodes / 4 ms; returns the measured configurations in order."""
    asked = []

    class Made:
        def __init__(self, model, plans, *, batch, context, temperature):
            asked.append((batch, context, [plan.num_nodes for plan in plans], temperature))
            self.plans = plans

    def measure(benches, repeats):
        same, measured = {"low_ms": 1.0, "high_ms": 1.0, "samples": repeats, "calls": 1}, []
        for made in benches:
            kinds = [(phase, None) for phase in SHARED]
            kinds += [(phase, plan.num_nodes) for plan in made.plans for phase in OF_A_TREE]
            times = [n / 4 if phase == "round" else 1.0 for phase, n in kinds]
            measured.append([{"phase": s, "nodes": n, "ms": t} | same for (s, n), t in zip(kinds, times, strict=True)])
        return measured

    def zeros(config, drafter, dtype, *_) -> TreeFlash:
        specs = decoder.specs(config), drafter.specs()
        weights = jax.tree.map(lambda spec: np.zeros(spec.shape, dtype), specs, is_leaf=is_spec)
        return TreeFlash(config, Weights(*weights), drafter=drafter)

    monkeypatch.setattr(shapes, "random_pair", zeros)
    monkeypatch.setattr(latency, "Bench", Made)
    monkeypatch.setattr(latency, "measure", measure)
    return asked


def test_all_combinations_are_measured_and_results_of_other_settings_kept(made_up, tmp_path, capsys):
    out = tmp_path / "out.json"
    sizes = "--batch 1 2 --context 24 40 --nodes 64 8 16 8 --temperature 0.5 --dtype bfloat16 --head linear".split()
    for more in ([], ["--dtype", "float32", "--batch", "1"], ["--context", "40", "--repeats", "3"]):
        assert commands.main(["bench", "latency", *SMALL, *sizes, *more, "--out", str(out)]) == 0
    assert made_up[:4] == [(b, s, [8, 16, 64], 0.5) for b in (1, 2) for s in (24, 40)]
    results = json.loads(out.read_text())["results"]
    names = ("batch", "context", "dtype")
    kept = [(*(result["settings"][name] for name in names), result["phases"][0]["samples"]) for result in results]
    assert kept == [
        (1, 24, "bfloat16", 9), (2, 24, "bfloat16", 9), (1, 24, "float32", 9), (1, 40, "float32", 9),
        (1, 40, "bfloat16", 3), (2, 40, "bfloat16", 3),
    ], "the same settings replace"  # fmt: skip
    expected = {"shape": "verifier", "weights": "random", "nodes": [8, 16, 64], "head": "linear"}
    assert results[0]["settings"] | expected == results[0]["settings"] and results[0]["versions"]["jax"] == jax.__version__
    for private in (str(tmp_path), str(DATA), str(Path.home()), socket.gethostname()):
        assert private not in out.read_text()
    printed, steps = capsys.readouterr()
    assert "compiling and timing the phases at batch 1, context 24\n" in steps
    assert printed.startswith("shape verifier, weights random, ") and "batch 1, context 24, " in printed
    assert printed.count("round / step at 64 nodes: 16.00\n") == 8
    assert re.search(r"\n round .*16\.0000 .*1\.0000 - 1\.0000", printed)


@pytest.mark.parametrize("head, candidates", [("gru", 64), ("lowrank-rnn", 64), ("lowrank", 16)])
def test_a_head_has_its_default_number_of_candidates(made_up, head, candidates):
    parser = argparse.ArgumentParser()
    latency.add_arguments(parser)
    model = latency.draw_pair(parser.parse_args([*SMALL[:4], "--head", head]))
    assert (model.drafter.head, model.drafter.candidates) == (head, candidates)


def test_attentions_are_measured_together(made_up, tmp_path):
    out = tmp_path / "out.json"
    assert commands.main(["bench", "latency", *SMALL, "--attention", "xla", "blocked", "--out", str(out)]) == 0
    assert [result["settings"]["attention"] for result in json.loads(out.read_text())["results"]] == ["xla", "blocked"]


@pytest.mark.parametrize("arguments, words", [
    (["--shape", "qwen9"], "got shape 'qwen9', expected one of qwen3-0.6b"),
    (["--shape", str(PAIR / "drafter")], "expected a verifier's"),
    (["--shape", "qwen3-4b", "--drafter-shape", str(PAIR / "drafter")], "drafter does not fit the verifier"),
    (["--verifier", "tiny", "--shape", "tiny"], "got a shape and --verifier or --drafter, expected sizes or a pair"),
    pytest.param([*TINY, "--mesh", "2x1", "--batch", "3"], "got --batch 3, expected a multiple", marks=needs_8_devices),
    ([*TINY, "--builder", "none"], "got builder 'none', expected one that drafts"),
    ([*TINY, "--nodes", "4", "17", "--builder", "chain"], "got --nodes 17, expected at most 16 with --builder chain"),
])  # fmt: skip
def test_mistakes_end_with_one_line_before_anything_is_measured(monkeypatch, capsys, arguments, words):
    monkeypatch.setattr(latency, "measure", lambda *_: pytest.fail("measured"))
    mistake(capsys, commands.main, ["bench", "latency", *arguments], words)


def test_a_context_without_room_for_rounds_is_refused(tiny):
    refused(lambda: phases.Bench(tiny, make_plans(tiny, 16), batch=1, context=2000), "2000 prompt tokens", "context")


def test_too_little_memory_is_one_line():
    with pytest.raises(ValueError, match="^batch 2, context 40: the devices have too little memory for it$"):
        with phases.running(None, "batch 2, context 40"):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.")
    with pytest.raises(jax.errors.JaxRuntimeError), phases.running(None, "batch 2, context 40"):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")
