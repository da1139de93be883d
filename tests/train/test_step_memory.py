"""Compiling a step without weights: it prints the program's numbers."""

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

from train import step_memory
from treeflash_jax.bench import shapes
from treeflash_jax.core import parameters
from treeflash_jax.models import decoder

ROOT = str(Path(__file__).parents[2])
HEAD = f"{ROOT}/configs/qwen3-4b/head.toml"
SIZES = dict(vocab_size=256, hidden_size=32, intermediate_size=64, num_layers=5, num_heads=8, head_dim=8)
ABSENT = ("grain", "datasets", "tokenizers", "transformers", "orbax", "orbax.checkpoint", "tensorboardX")
SCRIPT = f"""
import dataclasses, functools, sys
sys.modules.update(dict.fromkeys({ABSENT!r}))
from treeflash_jax.bench import shapes
from train import step_memory
shapes.SHAPES["small"] = dataclasses.replace(shapes.SHAPES["qwen3-4b"], **{SIZES!r})
shapes.find_drafter = functools.partial(shapes.find_drafter, num_layers=2)
sys.exit(step_memory.main(sys.argv[1:]))
"""
MEMORY = ["--shape", "small"]
SMALL = ["data.sequence_length=32", "objective.anchors=4", "objective.chunk=2", "loop.batch=8"]


@pytest.fixture
def small_shape(monkeypatch):
    small = dataclasses.replace(shapes.SHAPES["qwen3-4b"], **SIZES)
    monkeypatch.setitem(shapes.SHAPES, "small", small)
    monkeypatch.setattr(shapes, "find_drafter", partial(shapes.find_drafter, num_layers=2))


@pytest.mark.slow
def test_a_step_compiles_for_the_devices_at_hand(small_shape, tmp_path, capsys):
    out = tmp_path / "compiled.json"
    out.write_text('{"earlier": {"bytes_per_device": {}}}')
    words = [HEAD, *SMALL, "mesh.data=2", "mesh.fsdp=2", "mesh.model=2", "quantize=int4", "--out", str(out)]
    assert step_memory.main([*MEMORY, *words]) == 0
    results = json.loads(out.read_text())
    (key,) = results.keys() - {"earlier"}
    result = results[key]
    assert result["mesh"] == {"data": 2, "fsdp": 2, "model": 2} and result["trains"] == ["backbone", "head"]
    assert result["attention"] == "chunked" and result["flops_per_device"] == result["flops_per_step"] / 8
    assert result["bytes_per_device"]["total"] > result["bytes_per_device"]["temporary"] > 0
    assert result["fits"] and "  temporary  " in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "size"), [("drafter", "mask_token_id=3"), ("head", "loop.steps=1")])
def test_commands_for_a_pod_compile(small_shape, capsys, stage, size):
    """With their settings and as many parts, on eight devices for sixteen."""
    page = Path(ROOT, "train", "pod", "README.md").read_text()
    [words] = re.findall(rf"^train/launch\.sh pod run python -m train\.{stage} (\S+qwen3-4b.*)$", page, flags=re.MULTILINE)
    file, *overrides = words.split()
    parts = int(re.search(r"loop\.accumulate=(\d+)", words)[1])
    small = [*SMALL, f"loop.batch={8 * parts}", "mesh.fsdp=8", size]
    assert step_memory.main([*MEMORY, f"{ROOT}/{file}", *overrides, *small]) == 0
    assert "'fsdp': 8" in (shown := capsys.readouterr().out) and f"{8 * parts} sequences of 32 tokens" in shown


@pytest.mark.slow
def test_compiling_needs_no_packages_of_training():
    """No grain, datasets, tokenizers, transformers or Orbax, and a shape by name."""
    words = [*MEMORY, HEAD, *SMALL, "evaluate.prompts=0", "mesh.data=1", "loop.batch=1"]
    shown = toy_training.finish(toy_training.start([sys.executable, "-c", SCRIPT, *words]))
    assert "1 sequences of 32 tokens" in shown


@pytest.mark.parametrize(("words", "message"), [
    (["--shape", "huge", HEAD], "got shape 'huge'"),
    ([HEAD, *SMALL, "loop.batch=3"], "expected a multiple"),
    (["loop.batch=3"], "expected one TOML file"),
    ([HEAD, "--topologie", "v5e:4x4"], "did you mean --topology?"),
])  # fmt: skip
def test_errors_are_one_line(small_shape, capsys, words, message):
    mistake(capsys, step_memory.main, [*MEMORY, *words], message)


def test_named_shapes_are_those_published():
    for name, billions in (("qwen3-0.6b", 0.596), ("qwen3-4b", 4.022), ("qwen3-8b", 8.19)):
        leaves = jax.tree.leaves(decoder.specs(shapes.find_verifier(name)), is_leaf=parameters.is_spec)
        assert sum(math.prod(spec.shape) for spec in leaves) / 1e9 == pytest.approx(billions, rel=0.01)
