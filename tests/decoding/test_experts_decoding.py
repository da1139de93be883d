"""A mixture of experts as a verifier of whole answers: on a mesh as on one device, in int8, checked."""

from dataclasses import replace

import jax
import pytest
from answers import PROMPTS, SAMPLED, TREE, make_pair
from compiled import gathered_shapes
from conftest import RANDOM_DRAFTER, RANDOM_MODEL, needs_8_devices

from treeflash_jax import GenerateConfig, make_mesh
from treeflash_jax.bench import phases
from treeflash_jax.core import programs
from treeflash_jax.drafters.block.block_drafter import fresh_layers

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


def test_floors_of_a_step_and_a_verify_pass_count_the_experts_of_one_token():
    model = make_pair(MODEL, DRAFTER)
    bench = phases.Bench(model, [model.plan(GenerateConfig(**TREE))], batch=1, context=40)
    layers = [layer for group in model.weights.verifier["groups"] for layer in group if "router" in layer]
    experts = sum(layer[name].nbytes for layer in layers for name in ("expert_gate", "expert_up", "expert_down"))
    read_whole = {name: tree for name, tree in model.weights.verifier.items() if name != "embed"}  # beside `unembed`
    least = sum(x.nbytes for x in jax.tree.leaves(read_whole)) - experts * (1 - 2 / 16)
    read = {phase.name: phase.reads for phase in bench.phases}
    cached = 40 * 3 * 2 * MODEL.num_kv_heads * MODEL.head_dim * 4
    for phase in ("step", "verify"):
        assert least + cached <= read[phase] < least + cached + 4096
