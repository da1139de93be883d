"""Gemma 4's assistants against what transformers computed in float32 for small random weights; their files and refusals.

The fixtures have the first token after three prompts, and the chain of four tokens that is drafted after it.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import planned_batch
from conftest import DATA
from refusals import refused

import treeflash_jax as tf
from treeflash_jax.decoding import loops, rounds
from treeflash_jax.decoding.state import Weights
from treeflash_jax.formats import model_files

NAMES = ("gemma4", "gemma4_edge")
FOLDER = DATA / "hybrid"
ATOL = 5e-4


@pytest.mark.parametrize("name", NAMES)
def test_chains_are_the_published_ones(name):
    """Through the state and the lanes of decoding: the hidden state after the prompt, and a chain of one lane."""
    folder, expected = FOLDER / name, dict(np.load(FOLDER / name / "expected.npz"))
    config, params = model_files.load_verifier(folder)
    drafter, weights = model_files.load_drafter(folder / "assistant")
    assert drafter.layers.window == 13, "12 committed positions"
    drafter = replace(drafter, layers=replace(drafter.layers, window=14)).fitted(config)  # as transformers
    pair = tf.TreeFlash(config, Weights(params, weights), drafter=drafter, stop_ids=())
    prompts = [expected[f"prompt{i}"].tolist() for i in range(3)]
    plan, inputs = planned_batch(pair, prompts, builder="walk", depths=4, children=16)
    begun = loops.init_state(*inputs, plan=plan.shared, dtype=pair.dtype, can_cut=True)  # rings would hold 12 positions
    state = loops.prefill_chunks(pair.weights, begun, inputs[1], jnp.int32(9), plan=plan.shared)

    @jax.jit
    def chain(weights, state):
        expander = rounds.draft_expander(weights, state, plan)
        lane, tokens, log_probs = expander.start(1), [], []
        for depth in range(4):
            offered = expander.children(jnp.int32(depth), lane)
            tokens.append(offered[0][:, 0])
            log_probs.append(offered[1][:, 0])
            lane = expander.follow(jnp.int32(depth), lane, jnp.zeros((3, 1), jnp.int32))
        return jnp.stack(tokens, axis=1), jnp.stack(log_probs, axis=1)

    tokens_bic, log_probs_bic = jax.tree.map(np.asarray, chain(pair.weights, state))
    for i in range(3):
        assert state.tokens_bs[i, len(prompts[i])] == expected[f"mtp_first{i}"]
        assert tokens_bic[i, :, 0].tolist() == expected[f"mtp_chain{i}"].tolist()
        log_probs_iv = jax.nn.log_softmax(expected[f"mtp_chain_logits{i}"], axis=-1)
        wanted_ic = np.take_along_axis(np.asarray(log_probs_iv), tokens_bic[i], axis=-1)
        np.testing.assert_allclose(log_probs_bic[i], wanted_ic, atol=ATOL)
        np.testing.assert_allclose(wanted_ic, -np.sort(-np.asarray(log_probs_iv), axis=-1)[:, :16], atol=ATOL)
