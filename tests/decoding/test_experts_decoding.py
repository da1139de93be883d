"""A mixture of experts as a verifier of whole answers: on a mesh as on one device, in int8, checked, measured."""

import json
from dataclasses import replace

import pytest
from answers import PROMPTS, SAMPLED, TREE, make_pair
from compiled import gathered_shapes
from conftest import RANDOM_DRAFTER, RANDOM_MODEL, needs_8_devices

from treeflash_jax import make_mesh
from treeflash_jax.cli import commands
from treeflash_jax.core import programs
from treeflash_jax.drafters.block.block_drafter import fresh_layers
from treeflash_jax.formats.architectures import ARCHITECTURES

MODEL = replace(
    RANDOM_MODEL, num_experts=16, experts_per_token=2, expert_size=8, normalize_experts=True, dense_layers=(1,),
    model_type="qwen3_moe",
)  # fmt: skip
DRAFTER = replace(RANDOM_DRAFTER, layers=fresh_layers(MODEL, 1))
pytestmark = pytest.mark.slow


@needs_8_devices
@pytest.mark.parametrize("sizes", [
    {"data": 2, "model": 4},
    {"data": 2, "model": 4, "experts": 1},
    {"data": 2, "model": 2, "experts": 2},
])  # fmt: skip
def test_eight_devices_answer_as_one_and_no_round_moves_weights(sizes):
    expected = make_pair(MODEL, DRAFTER).generate(PROMPTS, builder="none", max_new_tokens=24, **SAMPLED)
    programs.clear()
    sharded = make_pair(MODEL, DRAFTER, mesh=make_mesh(**sizes))
    results = sharded.generate(PROMPTS, **TREE, max_new_tokens=24, **SAMPLED)
    assert [result.ids for result in results] == [result.ids for result in expected]
    gathered, matrix = gathered_shapes(), {MODEL.hidden_size, MODEL.expert_size}
    assert gathered, "candidates of the vocabulary's shards travel"
    assert not [shape for shape in gathered if len(shape) > 2 and {*shape[-2:]} == matrix], "weights travel"


def test_bench_latency_counts_experts(tmp_path, capsys):
    """Per layer and number of nodes; the floor of a verify pass follows the count."""
    (tmp_path / "config.json").write_text(json.dumps(ARCHITECTURES["qwen3_moe"].to_hf(MODEL)))
    sizes = "--nodes 3 8 --batch 2 --context 40 --candidates 4 --children 4 --repeats 2 --dtype float32".split()
    out = tmp_path / "out.json"
    assert commands.main(["bench", "latency", "--shape", str(tmp_path / "config.json"), *sizes, "--out", str(out)]) == 0
    [result] = json.loads(out.read_text())["results"]
    counted = {count["tokens"]: count for count in result["experts"]}
    assert list(counted) == [1, 3, 8] and all(len(count["by_layer"]) == 2 for count in counted.values())
    means = [sum(count["by_layer"]) / 2 for count in counted.values()]
    assert 2 <= means[0] <= 4 and means == sorted(means) and means[-1] <= 16
    assert counted[8]["at_random"] == pytest.approx(16 * (1 - (14 / 16) ** 16))
    verify = {stage["nodes"]: stage["bytes"] for stage in result["phases"] if stage["phase"] == "verify"}
    of_expert = 2 * 3 * 4 * 32 * 8  # in both sparse layers
    grown = verify[8] - verify[3] - (means[2] - means[1]) * of_expert
    assert 0 < grown < 5 * 2 * 64, "a few numbers of each node beside the experts"
    assert "experts that a layer reads in a pass over 8 tokens" in capsys.readouterr().out
