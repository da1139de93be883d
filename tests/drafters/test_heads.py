"""Heads of block drafters: trees are built from what training compares with the verifier, over a shortlist if asked."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import RANDOM_DRAFTER, RANDOM_MODEL, needs_8_devices
from scipy.special import log_softmax

import treeflash_jax as tf
from treeflash_jax.core import parameters
from treeflash_jax.core.devices import Device
from treeflash_jax.drafters import BlockConfig
from treeflash_jax.drafters.block.heads import HEADS, Unembed
from treeflash_jax.engine.plan import resolve

BATCH, V, D, DEPTHS = 3, 60, RANDOM_MODEL.hidden_size, RANDOM_DRAFTER.num_depths  # no other size is 60
DRAFTER = replace(RANDOM_DRAFTER, layers=replace(RANDOM_DRAFTER.layers, vocab_size=V))
TEMPERATURES = np.array([1.0, 0.7, 1.6])


@pytest.fixture(scope="module")
def block():
    """Random tables, hidden states of a block, and anchors."""
    keys = jax.random.split(jax.random.key(0), 3)
    table_vd, other_vd = (0.3 * jax.random.normal(key, (V, D)) for key in keys[:2])
    hidden_bqd = jax.random.normal(keys[2], (BATCH, DEPTHS + 1, D))
    return Unembed(table_vd, other_vd, jnp.ones(D), 1e-6), hidden_bqd, jnp.asarray([5, 40, 11], jnp.int32)


def sized(candidates: int, children: int, shortlist: int = 0) -> BlockConfig:
    return replace(DRAFTER, candidates=candidates, children=children, shortlist=shortlist)


def make_weights(name: str):
    """Returns weights none of which is zero, so that the token before matters."""
    specs = HEADS[name].specs(DRAFTER)
    return {key: 0.3 * jax.random.normal(jax.random.key(i), spec.shape) for i, (key, spec) in enumerate(specs.items())}


def expand(name: str, block, drafter: BlockConfig, ids_z=None):
    """Returns the compiled function that gives the table of a block, over all tokens or these, and its arguments."""
    unembed, hidden_bqd, anchor_b = block
    if ids_z is not None:
        unembed = unembed.replace(unembed_vd=unembed.unembed_vd[ids_z], ids_v=jnp.asarray(ids_z))
    arguments = make_weights(name), unembed, hidden_bqd, anchor_b, drafter, jnp.asarray(TEMPERATURES)
    return jax.jit(HEADS[name].expand, static_argnums=4), arguments


def run(name: str, block, drafter: BlockConfig, ids_z=None):
    function, arguments = expand(name, block, drafter, ids_z)
    return jax.tree.map(np.asarray, function(*arguments))


@pytest.mark.parametrize(("name", "is_listed"), [*((name, False) for name in HEADS), ("mlp", True)])
@pytest.mark.parametrize("ids_z", [None, np.arange(1, V, 2)], ids=["all", "frequent"])
def test_contexts_of_the_table_are_the_logits_that_training_sees(block, name, is_listed, ids_z):
    """With all tokens, or all of a draft vocabulary, as candidates and children, and as a shortlist."""
    unembed, hidden_bqd, anchor_b = block
    head, params, size = HEADS[name], make_weights(name), V if ids_z is None else ids_z.size
    table = run(name, block, sized(size, size, size if is_listed else 0), ids_z)
    _, depths, contexts, _ = table.tokens_bimc.shape
    before_bim = np.zeros((BATCH, depths, contexts), np.int32)
    before_bim[:, 0] = anchor_b[:, None]
    for depth in range(1, depths):  # the token that leads to each context
        for b in range(BATCH):
            tokens, context = table.tokens_bimc[b, depth - 1], table.next_context_bimc[b, depth - 1]
            before_bim[b, depth, context[context >= 0]] = tokens[context >= 0]
    for depth in range(depths):
        hidden_brd = jnp.repeat(hidden_bqd[:, depth + 1 : depth + 2], contexts, axis=1)
        logits_brv = head.logits(params, unembed, jnp.asarray(before_bim[:, depth]), hidden_brd)
        if ids_z is not None:
            logits_brv = jnp.full_like(logits_brv, -jnp.inf).at[:, :, ids_z].set(logits_brv[:, :, ids_z])
        expected = jax.nn.log_softmax(logits_brv / TEMPERATURES[:, None, None], axis=-1)
        got = np.full((BATCH, contexts, V), -np.inf)
        np.put_along_axis(got, table.tokens_bimc[:, depth], table.log_probs_bimc[:, depth], axis=2)
        np.testing.assert_allclose(got, expected, atol=2e-5)


@pytest.mark.parametrize("name", HEADS)
def test_a_fresh_head_drafts_from_the_marginals(block, name):
    unembed, hidden_bqd, anchor_b = block
    fresh = parameters.initialize(HEADS[name].specs(DRAFTER), jax.random.key(0))
    drafter, one_b = sized(6, 5), jnp.ones(BATCH)
    got = HEADS[name].expand(fresh, unembed, hidden_bqd, anchor_b, drafter, one_b)
    plain = HEADS["marginal"].expand({}, unembed, hidden_bqd, anchor_b, drafter, one_b)
    np.testing.assert_array_equal(got.tokens_bimc[:, :, :1], plain.tokens_bimc)
    np.testing.assert_allclose(got.log_probs_bimc[:, :, :1], plain.log_probs_bimc, atol=2e-5)


def test_a_short_list_keeps_the_mass_of_what_it_leaves_out(block):
    """Low rank: contexts are distributions over the vocabulary in which tokens off the list have their marginal logits."""
    unembed, hidden_bqd, anchor_b = block
    head, params, one_b = HEADS["lowrank"], make_weights("lowrank"), jnp.ones(BATCH)
    table = head.expand(params, unembed, hidden_bqd, anchor_b, sized(4, 3), one_b)
    before = unembed, anchor_b[:, None], hidden_bqd[:, 1:2]
    logits = HEADS["marginal"].logits({}, *before), head.logits(params, *before)
    marginal, moved = (np.array(x[:, 0], np.float64) for x in logits)
    for b in range(BATCH):
        listed = np.argsort(-marginal[b], kind="stable")[:4]
        marginal[b, listed] = moved[b, listed]
        distribution = log_softmax(marginal[b])
        best = sorted(listed, key=lambda token: -distribution[token])[:3]
        assert np.asarray(table.tokens_bimc[b, 0, 0]).tolist() == best
        np.testing.assert_allclose(table.log_probs_bimc[b, 0, 0], distribution[best], atol=2e-5)


# The second stage over a shortlist.

M, K = 5, 6


def short_list(size: int) -> BlockConfig:
    return sized(M, K, size)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_children_are_distinct_tokens_of_the_list_with_a_distribution_of_their_own(block, size):
    """The list, and the mass off it, by hand: scores of the head's full contexts, mass off the list from the marginals."""
    table, (unembed, hidden_bqd, anchor_b) = run("mlp", block, short_list(size)), block
    marginal_biv = np.asarray(HEADS["marginal"].logits({}, unembed, anchor_b, hidden_bqd[:, 1:]), np.float64)
    likely_biv = np.argsort(-marginal_biv, axis=-1, kind="stable")
    anchor_b1m = np.broadcast_to(np.asarray(anchor_b)[:, None, None], (BATCH, 1, M))
    before_bx = jnp.asarray(np.concatenate([anchor_b1m, likely_biv[:, :-1, :M]], axis=1).reshape(BATCH, -1))
    hidden_bxd = jnp.repeat(hidden_bqd[:, 1:], M, axis=1)
    corrected_bxv = HEADS["mlp"].logits(make_weights("mlp"), unembed, before_bx, hidden_bxd)
    corrected_bimv = np.asarray(corrected_bxv, np.float64).reshape(BATCH, DEPTHS, M, V)
    assert table.tokens_bimc.shape[-1] == min(K, size * DEPTHS)
    for b, temperature in enumerate(TEMPERATURES):
        listed = set(likely_biv[b, :, :size].flatten().tolist())
        for i in range(DEPTHS):
            marginal_v = np.exp(marginal_biv[b, i] / temperature)
            others = np.sum(np.delete(marginal_v, [*listed]))
            for m in range(M if i else 1):
                mass_v = np.exp(corrected_bimv[b, i, m] / temperature)
                total = others + np.sum(mass_v[[*listed]])
                best = sorted(listed, key=lambda token: -mass_v[token])[:K]  # noqa: B023
                got = np.isfinite(table.log_probs_bimc[b, i, m])
                assert table.tokens_bimc[b, i, m][got].tolist() == best
                np.testing.assert_allclose(table.log_probs_bimc[b, i, m][got], np.log(mass_v[best] / total), atol=1e-4)


def test_no_logits_of_all_contexts_are_formed(block):
    for size, expected in ((0, True), (2, False)):
        function, args = expand("mlp", block, short_list(size))
        text = function.lower(*args).as_text()
        assert (f"tensor<{BATCH}x{1 + (DEPTHS - 1) * M}x{V}x" in text) == expected


@pytest.mark.parametrize(
    ("device", "vocab_size", "shortlist"), [("cpu", 2**14, 32), ("cpu", 2**14 - 1, 0), ("gpu", 2**14, 0), ("tpu", 2**14, 0)]
)
def test_a_cpu_shortlists_a_large_vocabulary_by_default(device, vocab_size, shortlist):
    models = RANDOM_MODEL, RANDOM_DRAFTER.layers
    verifier, layers = (replace(model, vocab_size=vocab_size) for model in models)

    def planned(**settings):
        drafter = replace(RANDOM_DRAFTER, layers=layers)
        config = tf.GenerateConfig(builder="best-first", **settings)
        return resolve(config, verifier, drafter, dtype=jnp.float32, device=Device(device)).draft.shortlist

    assert planned() == shortlist
    assert [planned(shortlist=asked) for asked in (0, 7)] == [0, 7]


@needs_8_devices
def test_sharded_equals_unsharded(block):
    whole = run("mlp", block, short_list(3))
    with jax.set_mesh(tf.make_mesh(2, 4)):
        split = run("mlp", block, short_list(3))
    np.testing.assert_array_equal(split.tokens_bimc, whole.tokens_bimc)
    np.testing.assert_allclose(split.log_probs_bimc, whole.log_probs_bimc, atol=1e-5)
