"""The same answers on a (data, model) mesh of 8 devices as on one, with weights, caches and vocabulary sharded."""

from dataclasses import replace

import jax
import pytest
from answers import PROMPTS, SAMPLED, TREE, drafted_as_plain
from compiled import gathered_shapes
from conftest import RANDOM_MODEL, needs_8_devices, random_pair
from jax.sharding import PartitionSpec

from treeflash_jax import TreeFlash, make_mesh
from treeflash_jax.core import programs
from treeflash_jax.decoding import loops

SETTINGS = {"max_new_tokens": 24} | SAMPLED
EXPERTS = replace(
    RANDOM_MODEL, num_experts=16, experts_per_token=2, expert_size=8, normalize_experts=True, dense_layers=(1,),
    model_type="qwen3_moe",
)  # fmt: skip
pytestmark = needs_8_devices


def assert_answers_are_those_of_one_device(config, mesh, also_plain: bool) -> TreeFlash:
    """Returns the pair on a mesh, whose compiled rounds gather neither logits nor caches nor weights."""
    expected = random_pair(config=config).generate(PROMPTS, builder="none", **SETTINGS)
    sharded = random_pair(mesh, config)
    programs.clear()
    drafted_as_plain(sharded, PROMPTS, TREE, plain=expected, **SETTINGS)
    assert_small_gathers()
    if also_plain:  # quick: test_constraints.py
        drafted_as_plain(sharded, PROMPTS, {"builder": "none"}, plain=expected, **SETTINGS)
    return sharded


def test_eight_devices_answer_as_one_with_weights_and_caches_in_shards():
    weights = assert_answers_are_those_of_one_device(RANDOM_MODEL, make_mesh(4, 2), also_plain=False).weights
    assert weights.verifier["embed"].sharding.spec == PartitionSpec("model", None)
    assert weights.verifier["groups"][0][0]["q"].sharding.spec == PartitionSpec("model", None, None)
    assert weights.drafter["head"]["token_ug"].sharding.spec == PartitionSpec(None, None, "model")
    [drafted] = programs.compiled(loops.decode)
    state = drafted.executable.output_shardings
    for cache in (state.cache, state.drafter.context):
        for sharding in jax.tree.leaves(cache.states):
            assert sharding.spec[:3] == ("data", None, "model")


@pytest.mark.slow
def test_experts_in_shards():
    assert_answers_are_those_of_one_device(EXPERTS, make_mesh(2, 2, experts=2), also_plain=True)


@pytest.mark.slow
def test_heads_that_the_mesh_does_not_divide_are_replicated_not_gathered():
    [expected] = random_pair().generate(PROMPTS[0], builder="none", max_new_tokens=24)
    model = random_pair(make_mesh(2, 4))  # two key/value heads over four devices
    programs.clear()
    [*_, result] = model.stream(PROMPTS[0], **TREE, max_new_tokens=24, rounds_per_dispatch=2)
    assert result.ids == expected.ids
    functions = [program.function for program in programs.compiled()]
    assert functions == [loops.make_keys, loops.init_state, loops.prefill_chunks, loops.decode], (
        "each hands on the layout of the next"
    )
    [*_, result] = model.stream(PROMPTS[0] * 20, **TREE, max_new_tokens=2)
    assert len(programs.compiled()) == len(functions), "a prompt that is read in pieces as well"
    assert_small_gathers()


def assert_small_gathers() -> None:
    """Candidates of the vocabulary's shards travel in a round, but no logits, no cache and no expert's matrix."""
    shapes = gathered_shapes()
    sizes, matrix = {size for shape in shapes for size in shape}, {EXPERTS.hidden_size, EXPERTS.expert_size}
    assert sizes, "top-k over a sharded vocabulary gathers its candidates"
    assert not sizes & {RANDOM_MODEL.vocab_size, 256}, "full logits, or a cache, were gathered"
    assert not [shape for shape in shapes if len(shape) > 2 and {*shape[-2:]} == matrix], "weights were gathered"
