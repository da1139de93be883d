"""A mixture of experts as a verifier of whole answers: on a mesh as on one device, in int8, checked, measured."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from answers import drafted_as_plain
from conftest import RANDOM_DRAFTER, RANDOM_MODEL, needs_8_devices

from treeflash_jax import make_mesh
from treeflash_jax.bench import shapes
from treeflash_jax.cli import commands
from treeflash_jax.cli.check import check
from treeflash_jax.core import parameters, programs
from treeflash_jax.decoding import loops
from treeflash_jax.decoding.loops import Weights
from treeflash_jax.drafters.block.block_config import fresh_layers
from treeflash_jax.engine.model import TreeFlash
from treeflash_jax.formats.architectures import ARCHITECTURES
from treeflash_jax.models import quantized, verifier

MODEL = replace(
    RANDOM_MODEL, num_experts=16, experts_per_token=2, expert_size=8, normalize_experts=True, dense_layers=(1,),
    model_type="qwen3_moe",
)  # fmt: skip
DRAFTER = replace(RANDOM_DRAFTER, layers=fresh_layers(MODEL, 1))
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10], [11]]
TREE = {"nodes": 8, "candidates": 4, "children": 4}
SETTINGS = {"max_new_tokens": 24, "temperature": [0.0, 0.7, 1.0, 0.0], "top_p": [1.0, 0.9, 0.8, 1.0]}

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:tau is")]  # lossless_float64.py has quick cases


def pair(mesh=None, dtype=jnp.float32, quantize: str | None = None) -> TreeFlash:
    """Random weights, equal however they are placed."""
    specs = verifier.specs(MODEL)
    drawn = parameters.initialize(specs, jax.random.key(0), dtype, scale=0.3)
    if mesh is not None:
        drawn = jax.device_put(drawn, parameters.shardings(specs, mesh))
    drawn = jax.tree.map(lambda weight, spec: quantized.compress(weight, spec, quantize, mesh), drawn, specs)
    drafter = shapes.random_pair(MODEL, DRAFTER, dtype, mesh).weights.drafter
    return TreeFlash(MODEL, Weights(drawn, drafter), drafter=DRAFTER, mesh=mesh)


@pytest.fixture(scope="module")
def alone() -> TreeFlash:
    return pair()


@pytest.fixture(scope="module")
def expected(alone) -> list[list[int]]:
    return [result.ids for result in alone.generate(PROMPTS, builder="none", **SETTINGS)]


def test_trees_answer_as_single_tokens(alone, expected):
    assert [result.ids for result in alone.generate(PROMPTS, **TREE, **SETTINGS)] == expected


@needs_8_devices
@pytest.mark.parametrize("sizes", [
    {"data": 2, "model": 4},
    {"data": 2, "model": 4, "experts": 1},
    {"data": 2, "model": 2, "experts": 2},
])  # fmt: skip
def test_eight_devices_answer_as_one_and_no_round_moves_weights(expected, sizes):
    programs.clear()
    model = pair(make_mesh(**sizes))
    assert [result.ids for result in model.generate(PROMPTS, **TREE, **SETTINGS)] == expected
    text = "".join(program.run.as_text() for program in programs.compiled(loops.decode))
    gathered = [shape.split(",") for shape in re.findall(r"= \(?\w+\[([\d,]*)\][^=]* all-gather", text)]
    assert gathered, "candidates of the vocabulary's shards travel"
    matrix = {str(MODEL.hidden_size), str(MODEL.expert_size)}
    assert not [shape for shape in gathered if len(shape) > 2 and {*shape[-2:]} == matrix], "weights travel"


def test_int8():
    drafted_as_plain(pair(quantize="int8"), PROMPTS, TREE, **SETTINGS)


def test_check_reports_the_gap_at_the_first_difference_in_bfloat16(tmp_path):
    model = pair(dtype=jnp.bfloat16)
    checks = check(model, PROMPTS * 4, **TREE, max_new_tokens=48)
    assert len(checks) == 16 and any(each.divergence is None for each in checks)
    for each in checks:
        assert (each.divergence is None) == (each.drafted.ids == each.plain.ids)
        assert each.divergence is None or each.divergence.gap >= 0


def test_bench_latency_counts_experts(tmp_path, capsys):
    """Per layer and number of nodes; the floor of a verify pass follows the count."""
    (tmp_path / "config.json").write_text(json.dumps(ARCHITECTURES["qwen3_moe"].to_hf(MODEL)))
    sizes = ["--nodes", "3", "8", "--batch", "2", "--context", "40", "--candidates", "4", "--children", "4"]
    out = tmp_path / "out.json"
    words = ["bench", "latency", "--shape", str(tmp_path / "config.json"), *sizes, "--repeats", "2", "--out", str(out)]
    assert commands.main([*words, "--dtype", "float32"]) == 0
    [result] = json.loads(out.read_text())["results"]
    counted = {count["tokens"]: count for count in result["experts"]}
    assert list(counted) == [1, 3, 8] and all(len(count["by_layer"]) == 2 for count in counted.values())
    means = [sum(count["by_layer"]) / 2 for count in counted.values()]
    assert 2 <= means[0] <= 4 and means == sorted(means) and means[-1] <= 16
    assert counted[8]["at_random"] == pytest.approx(16 * (1 - (14 / 16) ** 16))
    verify = {stage["nodes"]: stage["bytes"] for stage in result["phases"] if stage["phase"] == "verify"}
    of_expert = 2 * 3 * 4 * 32 * 8  # in both sparse layers
    per_node = 4 * 2 * (64 + 5 * 32 + 2 * 3 * 2 * 8)  # logits, five layers' features, keys and values, of both sequences
    grown = verify[8] - verify[3] - (means[2] - means[1]) * of_expert
    assert grown == pytest.approx(5 * per_node)
    assert "experts that a layer reads in a pass over 8 tokens" in capsys.readouterr().out
