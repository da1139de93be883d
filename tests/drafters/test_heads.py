"""Every head of block drafters: what trees are built from is what training compares with the verifier."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import RANDOM_DRAFTER

from treeflash_jax.core import parameters
from treeflash_jax.drafters.block import HEADS, DraftSettings, Unembed

BATCH, V, D = 2, RANDOM_DRAFTER.layers.vocab_size, RANDOM_DRAFTER.layers.hidden_size


@pytest.fixture(scope="module")
def block():
    """Random tables, hidden states of a block, and anchors."""
    keys = jax.random.split(jax.random.key(0), 4)
    table_vd, other_vd = (jax.random.normal(key, (V, D)) for key in keys[:2])
    hidden_bqd = jax.random.normal(keys[2], (BATCH, RANDOM_DRAFTER.block_size, D))
    return Unembed(table_vd, other_vd, jnp.ones(D), 1e-6), hidden_bqd, jnp.asarray([5, 40], jnp.int32)


def make_weights(name: str):
    """None is zero, so that the token before matters."""
    specs = HEADS[name].specs(RANDOM_DRAFTER)
    leaves = {key: jax.random.normal(jax.random.key(i), spec.shape) for i, (key, spec) in enumerate(specs.items())}
    return jax.tree.map(lambda x: 0.3 * x, leaves)


@pytest.mark.parametrize("name", HEADS)
def test_contexts_of_the_table_are_the_logits_that_training_sees(block, name):
    """With all tokens as candidates and children, at temperatures of 1 and 0.7."""
    unembed, hidden_bqd, anchor_b = block
    head, params, settings = HEADS[name], make_weights(name), DraftSettings(candidates=V, children=V)
    temperature_b = jnp.asarray([1.0, 0.7])
    table = jax.jit(head.expand, static_argnums=4)(params, unembed, hidden_bqd, anchor_b, settings, temperature_b)
    _, depths, contexts, _ = table.tokens_bimc.shape
    before_bim = np.zeros((BATCH, depths, contexts), np.int32)
    before_bim[:, 0] = anchor_b[:, None]
    for depth in range(1, depths):  # the token that leads to each context
        for b in range(BATCH):
            tokens, context = np.asarray(table.tokens_bimc[b, depth - 1]), np.asarray(table.next_context_bimc[b, depth - 1])
            before_bim[b, depth, context[context >= 0]] = tokens[context >= 0]
    for depth in range(depths):
        hidden_brd = jnp.repeat(hidden_bqd[:, depth + 1 : depth + 2], contexts, axis=1)
        logits_brv = head.logits(params, unembed, jnp.asarray(before_bim[:, depth]), hidden_brd)
        expected = jax.nn.log_softmax(logits_brv / temperature_b[:, None, None], axis=-1)
        got = np.zeros((BATCH, contexts, V))
        np.put_along_axis(got, np.asarray(table.tokens_bimc[:, depth]), np.asarray(table.log_probs_bimc[:, depth]), axis=2)
        np.testing.assert_allclose(got, expected, atol=2e-5)


@pytest.mark.parametrize("name", HEADS)
def test_a_fresh_head_drafts_from_the_marginals(block, name):
    unembed, hidden_bqd, anchor_b = block
    fresh = parameters.initialize(HEADS[name].specs(RANDOM_DRAFTER), jax.random.key(0))
    settings, one_b = DraftSettings(candidates=6, children=5), jnp.ones(BATCH)
    got = HEADS[name].expand(fresh, unembed, hidden_bqd, anchor_b, settings, one_b)
    plain = HEADS["marginal"].expand({}, unembed, hidden_bqd, anchor_b, settings, one_b)
    np.testing.assert_array_equal(got.tokens_bimc[:, :, :1], plain.tokens_bimc)
    np.testing.assert_allclose(got.log_probs_bimc[:, :, :1], plain.log_probs_bimc, atol=2e-5)


def test_a_short_list_keeps_the_mass_of_what_it_leaves_out(block):
    """Low rank: contexts are distributions over the vocabulary in which tokens off the list have their marginal logits."""
    unembed, hidden_bqd, anchor_b = block
    head, params, one_b = HEADS["lowrank"], make_weights("lowrank"), jnp.ones(BATCH)
    table = head.expand(params, unembed, hidden_bqd, anchor_b, DraftSettings(candidates=4, children=3), one_b)
    before_br = jnp.repeat(anchor_b[:, None], 1, axis=1)
    marginal = HEADS["marginal"].logits({}, unembed, before_br, hidden_bqd[:, 1:2])[:, 0]
    moved = head.logits(params, unembed, before_br, hidden_bqd[:, 1:2])[:, 0]
    for b in range(BATCH):
        listed = np.argsort(-np.asarray(marginal[b]), kind="stable")[:4]
        logits = np.asarray(marginal[b], np.float64).copy()
        logits[listed] = np.asarray(moved[b])[listed]
        distribution = logits - np.log(np.sum(np.exp(logits)))
        best = sorted(listed, key=lambda token: -distribution[token])[:3]
        assert np.asarray(table.tokens_bimc[b, 0, 0]).tolist() == best
        np.testing.assert_allclose(table.log_probs_bimc[b, 0, 0], distribution[best], atol=2e-5)
