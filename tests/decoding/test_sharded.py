"""The same answers on a (data, model) mesh of 8 devices as on one, with weights, caches and vocabulary sharded."""

import jax
import pytest
from answers import PROMPTS, SAMPLED, TREE
from compiled import gathered_shapes
from conftest import RANDOM_MODEL, needs_8_devices, random_pair
from jax.sharding import PartitionSpec

from treeflash_jax import make_mesh
from treeflash_jax.core import programs
from treeflash_jax.decoding import loops

SETTINGS = {"max_new_tokens": 24} | SAMPLED
pytestmark = needs_8_devices


@pytest.fixture(scope="module")
def sharded():
    return random_pair(make_mesh(4, 2))


@pytest.fixture(scope="module")
def expected():
    return [result.ids for result in random_pair().generate(PROMPTS, builder="none", **SETTINGS)]


def test_eight_devices_answer_as_one_and_no_round_gathers_logits_or_caches(sharded, expected):
    programs.clear()
    tree = sharded.generate(PROMPTS, **TREE, **SETTINGS)
    assert_small_gathers()
    plain = sharded.generate(PROMPTS, builder="none", **SETTINGS)
    assert [result.ids for result in tree] == [result.ids for result in plain] == expected


def test_weights_and_caches_are_sharded(sharded):
    weights = sharded.weights
    assert weights.verifier["embed"].sharding.spec == PartitionSpec("model", None)
    assert weights.verifier["groups"][0][0]["q"].sharding.spec == PartitionSpec("model", None, None)
    assert weights.drafter["head"]["token_ug"].sharding.spec == PartitionSpec(None, None, "model")
    programs.clear()
    sharded.generate(PROMPTS[0], **TREE, max_new_tokens=4)
    state = programs.compiled(loops.decode)[-1].run.output_shardings
    for cache in (state.cache, state.drafter.context):
        for sharding in jax.tree.leaves(cache.layers):
            assert sharding.spec[:2] == ("data", "model")


@pytest.mark.slow
def test_heads_that_the_mesh_does_not_divide_are_replicated_not_gathered(expected):
    model = random_pair(make_mesh(2, 4))  # two key/value heads over four devices
    programs.clear()
    [*_, result] = model.stream(PROMPTS[0], **TREE, max_new_tokens=24, rounds_per_dispatch=2)
    assert result.ids == expected[0]
    functions = [program.function for program in programs.compiled()]
    assert functions == [loops.make_keys, loops.begin, loops.read, loops.decode], "each hands on the layout of the next"
    [*_, result] = model.stream(PROMPTS[0] * 20, **TREE, max_new_tokens=2)
    assert len(programs.compiled()) == len(functions), "a prompt that is read in pieces as well"
    assert_small_gathers()


def assert_small_gathers() -> None:
    """Candidates of the vocabulary's shards travel in a round, but no logits and no cache."""
    gathered = {size for shape in gathered_shapes() for size in shape}
    assert gathered, "top-k over a sharded vocabulary gathers its candidates"
    assert not gathered & {RANDOM_MODEL.vocab_size, 256}, "full logits, or a cache, were gathered"
