"""Compiling a step without weights: the numbers it prints are those of the program."""

import dataclasses
import json
import math
import re
import sys
from functools import partial
from pathlib import Path

import jax
import pytest
import toy_training
from refusals import mistake

from train import compile as compiling
from treeflash_jax.bench import shapes
from treeflash_jax.core import parameters
from treeflash_jax.models import verifier

ROOT = str(Path(__file__).parents[2])
HEAD = f"{ROOT}/configs/qwen3-4b/head.toml"
SIZES = dict(vocab_size=256, hidden_size=32, intermediate_size=64, num_layers=5, num_heads=8, head_dim=8)
CLOCK = [0.0, 100.0, 0.0, 50.0, 0.0, 9.0, 0.0, 4.0, 0.0, 1.0]  # seconds of five steps
ABSENT = ("grain", "datasets", "tokenizers", "transformers", "orbax", "orbax.checkpoint", "matplotlib", "tensorboardX")
SCRIPT = f"""
import dataclasses, functools, sys
sys.modules.update(dict.fromkeys({ABSENT!r}))
from train import compile
from treeflash_jax.bench import shapes
shapes.VERIFIERS["small"] = dataclasses.replace(shapes.VERIFIERS["qwen3-4b"], **{SIZES!r})
shapes.find_drafter = functools.partial(shapes.find_drafter, num_layers=2)
sys.exit(compile.main(sys.argv[1:]))
"""
SMALL = ["data.sequence_length=32", "objective.anchors=4", "objective.chunk=2", "loop.batch=8"]


@pytest.fixture
def small_shape(monkeypatch):
    small = dataclasses.replace(shapes.VERIFIERS["qwen3-4b"], **SIZES)
    monkeypatch.setitem(shapes.VERIFIERS, "small", small)
    monkeypatch.setattr(shapes, "find_drafter", partial(shapes.find_drafter, num_layers=2))


@pytest.mark.slow
def test_a_step_compiles_for_the_devices_at_hand(small_shape, tmp_path, capsys):
    out = tmp_path / "compiled.json"
    out.write_text('{"earlier": {"bytes_per_chip": {}}}')
    words = ["--shape", "small", "--out", str(out), HEAD, *SMALL, "mesh.data=2", "mesh.fsdp=2", "mesh.model=2"]
    assert compiling.main(words) == 0
    results = json.loads(out.read_text())
    (key,) = results.keys() - {"earlier"}
    result = results[key]
    assert result["mesh"] == {"data": 2, "fsdp": 2, "model": 2} and result["trains"] == ["backbone", "head"]
    assert result["collectives"]["all-gather"]["count"] > 0 and result["attention"] == "chunked"
    assert result["bytes_accessed_per_chip"] > result["bytes_per_chip"]["state_and_weights"] * 2
    assert result["bytes_per_chip"]["total"] > result["bytes_per_chip"]["temporary"] > 0
    assert "bytes per chip" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "size"), [("drafter", "mask_token_id=3"), ("head", "loop.steps=1")])
def test_commands_for_a_pod_compile(small_shape, capsys, stage, size):
    """With their settings and as many parts, on eight devices for sixteen."""
    page = Path(ROOT, "train", "README.md").read_text()
    [words] = re.findall(rf"^train/launch\.sh pod run python -m train\.{stage} (.*)$", page, flags=re.MULTILINE)
    file, *overrides = words.split()
    parts = int(re.search(r"loop\.accumulate=(\d+)", words)[1])
    small = [*SMALL, f"loop.batch={8 * parts}", "mesh.fsdp=8", size]
    assert compiling.main(["--shape", "small", f"{ROOT}/{file}", *overrides, *small]) == 0
    assert "'fsdp': 8" in (shown := capsys.readouterr().out) and f"{8 * parts} sequences of 32 tokens" in shown


@pytest.mark.slow
def test_steps_on_random_arrays_train_and_are_timed(small_shape, tmp_path, capsys, monkeypatch):
    """Masters move and stay finite, and the frozen verifier is of the compute dtype."""
    out, ran, taken, run_steps = tmp_path / "compiled.json", [], {}, compiling.run_steps

    def run(compiled, state, frozen, batch, *, steps):
        def step(*arguments):
            taken["after"] = compiled(*arguments)
            return taken["after"]

        taken.update(before=jax.device_get(state.params), frozen=frozen, batch=jax.device_get(batch))
        return run_steps(step, state, frozen, batch, steps=steps)

    monkeypatch.setattr(compiling, "run_steps", run)
    monkeypatch.setattr(compiling.costs, "peak_flops", lambda devices, dtype: 1e9 * devices)
    monkeypatch.setattr(compiling.time, "perf_counter", lambda: ran.append(None) or CLOCK[len(ran) - 1])
    words = ["--shape", "small", "--out", str(out), "--steps", "3", HEAD, *SMALL, "mesh.data=2", "mesh.fsdp=2"]
    assert compiling.main([*words, "optimizer.learning_rate=1e-2", "optimizer.warmup=0.0"]) == 0
    [result] = json.loads(out.read_text()).values()
    assert len(ran) == 2 * (2 + 3), "two steps to warm up"
    assert result["steps"] == 3 and result["seconds_per_step"] == 4.0, "the median of those that count"
    assert result["tokens_per_second"] == 8 * 32 / 4.0
    assert result["mfu"] == pytest.approx(result["flops_per_step"] / 4.0 / 4e9)
    assert "4 s a step (median of 3), MFU" in capsys.readouterr().out
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), taken["before"], jax.device_get(taken["after"].params))
    assert all(jax.tree.leaves(moved)) and taken["after"].bad_step == -1
    assert {x.dtype.name for x in jax.tree.leaves(taken["before"])} == {"float32"}
    assert {x.dtype.name for x in jax.tree.leaves(taken["frozen"])} == {"bfloat16"}
    tokens_bt = taken["batch"].tokens_bt
    assert tokens_bt.shape == (8, 32) and 200 < tokens_bt.max() < 256 and taken["batch"].weights_bt.sum() == 8 * 31


@pytest.mark.slow
def test_steps_run_where_only_compiling_is_installed():
    """No grain, datasets, tokenizers, transformers or Orbax, and a shape by name."""
    words = ["--shape", "small", "--steps", "1", HEAD, *SMALL, "evaluate.prompts=0", "mesh.data=1", "loop.batch=1"]
    shown = toy_training.finish(toy_training.start([sys.executable, "-c", SCRIPT, *words]))
    assert "s a step (median of 1)" in shown


@pytest.mark.parametrize(("words", "message"), [
    (["--shape", "small", "--topology", "v5e:4x4", "--steps", "2", HEAD], "got --steps 2 and --topology v5e:4x4"),
    (["--shape", "small", "--steps", "-1", HEAD], "got --steps -1, expected at least 0"),
    (["--shape", "huge", HEAD], "got shape 'huge'"),
    (["--shape", "small", HEAD, *SMALL, "loop.batch=3"], "expected a multiple"),
    (["--shape", "small", "loop.batch=3"], "expected one TOML file"),
    (["--shape", "small", "--topologie", "v5e:4x4", HEAD], "did you mean --topology?"),
])  # fmt: skip
def test_errors_are_one_line(small_shape, capsys, words, message):
    mistake(capsys, compiling.main, words, message, statuses=(1, 2))


def test_named_shapes_are_those_published():
    for name, billions in (("qwen3-0.6b", 0.596), ("qwen3-4b", 4.022), ("qwen3-8b", 8.19), ("llama-3.1-8b", 8.03)):
        leaves = jax.tree.leaves(verifier.specs(shapes.find_verifier(name)), is_leaf=parameters.is_spec)
        assert sum(math.prod(spec.shape) for spec in leaves) / 1e9 == pytest.approx(billions, rel=0.01)
