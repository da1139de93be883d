"""Sampled trees in the decode round: what stays equal, what is refused, streams, meshes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import PROMPTS, SIZES, drafted_as_plain, prefilled
from conftest import needs_8_devices, random_pair
from refusals import refused

from treeflash_jax import GenerateConfig, make_mesh, trees
from treeflash_jax.core import programs
from treeflash_jax.decoding import accepting
from treeflash_jax.engine.comparison import compare_decodings
from treeflash_jax.trees.sampled.proposal import DETERMINISTIC

DRAFT = {"nodes": 8} | SIZES
TREE = DRAFT | {"max_new_tokens": 24}
SKELETON = {"builder": "skeleton", "skeleton": 0.4}


@pytest.fixture(scope="module")
def model():
    return random_pair()


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"builder": "paths"}, {"builder": "skeleton"}], ids=str)
def test_greedy_answers_are_those_of_plain_decoding(model, settings):
    draft = DRAFT | {"expected_lengths": True} | settings
    for result in drafted_as_plain(model, PROMPTS, draft, max_new_tokens=24):  # without coins nothing is left to chance
        np.testing.assert_allclose(result.expected_lengths, result.accepted_before_cut, atol=1e-5)


@pytest.mark.slow
def test_sample_and_match_gives_the_answer_of_plain_decoding_whatever_the_tree(model):
    draft = DRAFT | SKELETON | {"acceptance": "sample-and-match"}
    drafted_as_plain(model, PROMPTS, draft, temperature=[0.7, 1.0, 1.3, 1.0], seed=[1, 2, 3, 4], max_new_tokens=24)


@pytest.mark.slow
@needs_8_devices
def test_answers_do_not_depend_on_devices(model):
    sampling = {"temperature": [0.7, 1.0, 0.0, 1.0], "top_p": [1.0, 0.9, 1.0, 1.0], "seed": 5}
    one, eight = (pair.generate(PROMPTS, **SKELETON, **TREE, **sampling) for pair in (model, random_pair(make_mesh(4, 2))))
    assert [result.ids for result in eight] == [result.ids for result in one]


def test_draws_and_coins_are_fresh_every_round_and_apart_from_the_verifiers_noise(model):
    _, state = prefilled(model, PROMPTS[:1], **TREE)
    later = state.replace(cache=state.cache.replace(length_b=state.cache.length_b + 1))
    streams = accepting.VERIFY_STREAM, accepting.DRAFT_STREAM, accepting.COINS_STREAM
    keys = [str(jax.random.key_data(accepting.round_keys(at, stream))) for at in (state, later) for stream in streams]
    assert len({*keys}) == 6
    coins, bonus = accepting.draw_coins(state, 3, jnp.zeros((1, 4, 9)))
    assert coins.shape == (1, 3) and bonus.shape == (1, 9)
    assert (coins != accepting.draw_coins(later, 3, jnp.zeros((1, 4, 9)))[0]).all()


def test_a_check_of_a_rule_that_draws_other_tokens_is_refused(model):
    before = len(programs.compiled())
    refused(
        lambda: compare_decodings(model, PROMPTS[:1], temperature=1.0, **SKELETON), "'traversal' at temperature above 0"
    )
    assert len(programs.compiled()) == before


def test_rules_that_suit_the_builder_are_the_default(model):
    for builder, branches, rule in (
        (None, 2, "sample-and-match"), ("paths", 1, "block"), ("paths", 2, "traversal"), ("skeleton", 2, "traversal")
    ):  # fmt: skip
        config = GenerateConfig(nodes=8, builder=builder, branches=branches)
        assert model.plan(config).rule == rule


def table_of_equal_nodes() -> trees.TransitionTable:
    shape = (5, 4, 4, 4)  # sequences, depths, contexts, children
    return trees.TransitionTable(
        jnp.broadcast_to(jnp.arange(10, 14), shape),
        jnp.broadcast_to(jnp.log(jnp.asarray([0.4, 0.3, 0.2, 0.1])), shape),
        jnp.broadcast_to(jnp.arange(4), shape),
    )


@pytest.mark.parametrize("name", ["delayed", "without-replacement", "skeleton"])
def test_only_nodes_with_drawn_children_have_a_proposal_distribution(name):
    """Regression: k-sequential computed NaN at a leaf above the deepest level of its batch if p = q there."""
    table = table_of_equal_nodes()
    noise_bnc = jax.jit(partial(trees.draw_noise, num_nodes=8))(jax.random.split(jax.random.key(0), 5), table)
    inputs = partial(trees.TreeInputs, table, jnp.zeros(5, jnp.int32), 8, trees.TreeShape())
    build = jax.jit(lambda noise_bnc: trees.BUILDERS[name].build(inputs(noise_bnc)))
    tree, proposal = jax.tree.map(np.asarray, build(noise_bnc))
    is_drawn_bx = (proposal.node_bx > 0) & (proposal.kind_bx != DETERMINISTIC)
    parent_bx = np.where(is_drawn_bx, np.take_along_axis(tree.parent_bn, proposal.node_bx, axis=1), -1)
    has_draws_bn = np.any(parent_bx[:, None] == np.arange(tree.tokens_bn.shape[1])[:, None], axis=-1)
    np.testing.assert_array_equal(np.any(np.isfinite(proposal.log_q_bnc), axis=-1), has_draws_bn)


@pytest.mark.parametrize("shape", [{}, {"branches": 1}, {"branches": 3, "trunk": 1}], ids=str)
@pytest.mark.parametrize("name", ["paths", "delayed", "skeleton"])
def test_sizes_are_those_of_the_trees(name, shape):
    """Paths that end at the last depth leave nodes over: plans and records have the number that is verified."""
    builder, table, shape = trees.BUILDERS[name], table_of_equal_nodes(), trees.TreeShape(**shape)
    for nodes in (2, 5, 64):
        noise_bnc = jax.ShapeDtypeStruct((5, nodes, 4), jnp.float32)
        inputs = partial(trees.TreeInputs, table, jnp.zeros(5, jnp.int32), nodes, shape)
        tree, _ = jax.eval_shape(lambda noise_bnc, inputs=inputs: builder.build(inputs(noise_bnc)), noise_bnc)
        assert tree.tokens_bn.shape[1] == builder.size(4, nodes, shape) <= nodes
