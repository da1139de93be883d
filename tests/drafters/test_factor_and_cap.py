"""Block drafters of verifiers with a factor of embeddings and a cap on logits."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import draw, random_weights, slow_unless
from conftest import RANDOM_DRAFTER, RANDOM_MODEL
from scipy.special import log_softmax

from treeflash_jax.drafters.block.heads import Unembed
from treeflash_jax.drafters.protocol import Inputs


def test_a_block_is_embedded_with_the_verifiers_factor():
    table_vd, anchor_b = 0.3 * draw(RANDOM_MODEL.vocab_size, RANDOM_MODEL.hidden_size), jnp.array([5, 40])
    weights, state = random_weights(RANDOM_DRAFTER.specs()), RANDOM_DRAFTER.init(2, 16, jnp.float32)

    @jax.jit
    def hidden_states(weights, state, table_vd):
        inputs = Inputs(weights, {"embed": table_vd}, state, anchor_b, jnp.ones(2), 3, None, None)
        return RANDOM_DRAFTER.draft_block(inputs), replace(RANDOM_DRAFTER, embedding_factor=3.0).draft_block(inputs)

    plain, scaled = hidden_states(weights, state, table_vd)
    np.testing.assert_allclose(scaled, hidden_states(weights, state, 3 * table_vd)[0], atol=1e-5)
    assert np.max(np.abs(scaled - plain)) > 0.1


@partial(jax.jit, static_argnums=0)
def second_level(drafter, weights, state, tables):
    """Log-probabilities of the children of the anchor's first child."""
    anchor_b = jnp.array([5, 40])
    expander = drafter.draft(Inputs(weights, tables, state, anchor_b, jnp.ones(2), drafter.num_depths, None, None))
    state_bw = expander.start(1)
    tokens_bwc, _ = expander.children(jnp.int32(0), state_bw)
    state_bw = expander.follow_token(jnp.int32(0), state_bw, tokens_bwc[..., 0])
    return expander.children(jnp.int32(1), state_bw)[1]


def made(head: str, **fields) -> tuple:
    """A drafter with random weights, its empty state, and a verifier's two tables."""
    drafter = replace(RANDOM_DRAFTER, head=head, candidates=4, children=4, **fields)
    tables_2vd = 0.3 * draw(2, RANDOM_MODEL.vocab_size, RANDOM_MODEL.hidden_size)
    tables = dict(zip(("embed", "unembed"), tables_2vd, strict=True))
    return drafter, random_weights(drafter.specs()), drafter.init(2, 16, jnp.float32), tables


@pytest.mark.parametrize("head", [slow_unless(head == "gru", head) for head in ("mlp", "linear", "gru", "lilicorr")])
def test_heads_embed_earlier_tokens_with_the_verifiers_factor(head):
    """The factor is that of a table with larger vectors."""
    drafter, *arrays, tables = made(head)
    scaled = second_level(replace(drafter, embedding_factor=3.0), *arrays, tables)
    larger = second_level(drafter, *arrays, tables | {"embed": 3 * tables["embed"]})
    np.testing.assert_allclose(scaled, larger, atol=1e-4)
    assert np.max(np.abs(scaled - second_level(drafter, *arrays, tables))) > 1e-3


def test_a_shortlist_of_all_tokens_changes_nothing_under_a_cap():
    drafter, *arrays = made("mlp", logit_cap=0.5)
    listed = second_level(replace(drafter, shortlist=RANDOM_MODEL.vocab_size), *arrays)
    np.testing.assert_allclose(listed, second_level(drafter, *arrays), atol=1e-4)


@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_log_probabilities_are_those_of_capped_logits(cap):
    table_vd, hidden_btd = draw(60, 8), draw(3, 2, 8)
    unembed = Unembed(table_vd, table_vd, np.ones(8, np.float32), 1e-6, logit_cap=cap)
    logits_btv = np.asarray(unembed.normed(hidden_btd)) @ table_vd.T
    expected = log_softmax(cap * np.tanh(logits_btv / cap) if cap else logits_btv, axis=-1)
    ids_btk, log_probs_btk = unembed.likeliest(hidden_btd, 7, jnp.ones(3))
    np.testing.assert_allclose(log_probs_btk, np.take_along_axis(expected, np.asarray(ids_btk), axis=-1), atol=1e-5)
    np.testing.assert_allclose(log_probs_btk, -np.sort(-expected, axis=-1)[..., :7], atol=1e-5)
