"""Three small pairs against numbers computed by the published PyTorch code: every stage, then whole generations.

The folders are described in tests/data/conformance; each has settings.json and expected.npz beside its weights.
"""

import json
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import read_texts, slow, slow_unless
from conftest import CONFORMANCE, DATA
from draft_trees import grow

import treeflash_jax as tf
from treeflash_jax import trees
from treeflash_jax.drafters import Inputs, NewPositions
from treeflash_jax.drafters.block import backbone
from treeflash_jax.drafters.block.heads import Unembed
from treeflash_jax.models import vocab

TOLERANCE = 1e-4


@partial(jax.jit, static_argnames=("config", "drafter", "nodes"))
def run_stages(weights, prompt_bt, config, drafter, nodes):
    """One round by hand, from the prompt to the tree."""
    length = prompt_bt.shape[1]
    out, logits_btv = read_texts(weights.verifier, config, prompt_bt, taps=drafter.taps)
    anchor_b = jnp.argmax(logits_btv[:, -1], axis=-1).astype(jnp.int32)
    params, tables, count_b = weights.drafter["backbone"], weights.verifier, jnp.array([length])
    empty = drafter.init(1, 64, jnp.float32)
    state = drafter.extend(weights.drafter, tables, empty, NewPositions(out.features_btj, None, count_b))
    inputs = Inputs(weights.drafter, tables, state, anchor_b, jnp.ones(1), drafter.num_depths, prompt_bt, count_b)
    hidden_bqd = drafter.draft_block(inputs)
    unembed_vd = tables.get("unembed", tables["embed"])
    unembed = Unembed(tables["embed"], unembed_vd, params["norm"], drafter.layers.rms_norm_eps)
    logits_bqv = vocab.unembed(unembed.unembed_vd, unembed.normed(hidden_bqd))
    table = drafter.draft(inputs)
    grown = grow("best-first", table, anchor_b, nodes)
    return {
        "verifier_logits": logits_btv,
        "context_features": out.features_btj,
        "anchor": anchor_b,
        "fused_context": backbone.fuse(params, drafter.layers, out.features_btj),
        "block_hidden": hidden_bqd,
        "block_logits": logits_bqv,
        "candidates": vocab.top_k(logits_bqv, drafter.candidates)[1],
        "table": table,
        "tree": grown,
        "mask": trees.ancestor_mask(grown.parent_bn, drafter.num_depths),
        "chain": grow("chain", table, anchor_b, drafter.block_size),
    }


@pytest.fixture(scope="module", params=CONFORMANCE)
def pair(request) -> SimpleNamespace:
    """One folder: the loaded model, its settings, what is expected, and what the stages gave."""
    folder = DATA / "conformance" / request.param
    settings = json.loads((folder / "settings.json").read_text())
    expected = dict(np.load(folder / "expected.npz"))
    model = tf.load(verifier=folder / "verifier", drafter=folder / "drafter")
    drafter = model.drafter.configured(candidates=settings["top_m"], children=settings["top_k"])
    sizes = dict(config=model.verifier, drafter=drafter)
    stages = run_stages(model.weights, jnp.asarray(expected["prompt"], jnp.int32), **sizes, nodes=settings["tree_size"])
    return SimpleNamespace(model=model, settings=settings, expected=expected, stages=jax.tree.map(np.asarray, stages))


def test_stages_up_to_the_candidates(pair):
    for stage in ("verifier_logits", "context_features", "fused_context", "block_hidden", "block_logits"):
        np.testing.assert_allclose(pair.stages[stage], pair.expected[stage], atol=TOLERANCE, rtol=0, err_msg=stage)
    assert pair.stages["anchor"] == pair.expected["anchor"].ravel()
    if "stage1_tokens" in pair.expected:  # position 0 is a dummy: depth 0 follows the anchor
        candidates = pair.stages["candidates"][0, 1:-1], pair.expected["stage1_tokens"][1:]
        np.testing.assert_array_equal(*map(np.sort, candidates))


def test_transitions(pair):
    """Positions are compared as sets of (token, log-probability): in a_treeflash neighbours come as close as 1e-4."""
    table = pair.stages["table"]
    if "transition_tokens" not in pair.expected:
        assert pair.model.drafter.head == "marginal" and table.tokens_bimc.shape[2] == 1
        logits_qv = pair.expected["block_logits"][0].astype(np.float64)
        tokens = np.argsort(-logits_qv, axis=-1)[1:, None, : pair.settings["top_k"]]
        normalised = logits_qv - np.log(np.exp(logits_qv).sum(-1, keepdims=True))
        log_probs = np.take_along_axis(normalised[1:, None], tokens, -1)
    else:
        tokens, log_probs = pair.expected["transition_tokens"], pair.expected["transition_log_probs"]
        candidates = pair.expected["stage1_tokens"][1:]
        follows = table.tokens_bimc[0, :-1, :, :, None] == candidates[:, None, None, :]
        np.testing.assert_array_equal(table.next_context_bimc[0, :-1], np.where(follows.any(-1), follows.argmax(-1), -1))
    assert (table.next_context_bimc[0, -1] == -1).all()
    got_order, order = np.argsort(table.tokens_bimc[0]), np.argsort(tokens)
    np.testing.assert_array_equal(np.sort(table.tokens_bimc[0]), np.sort(tokens))
    pairs = (table.log_probs_bimc[0], got_order), (log_probs, order)
    np.testing.assert_allclose(*(np.take_along_axis(x, by, -1) for x, by in pairs), atol=TOLERANCE, rtol=0)


def test_tree_and_chain_node_for_node(pair):
    grown, expected = pair.stages["tree"], pair.expected
    assert grown.valid_bn.all()
    np.testing.assert_array_equal(grown.tokens_bn[:, 1:], expected["tree_tokens"][:, 1:])
    np.testing.assert_array_equal(grown.depth_bn, expected["tree_depths"])
    np.testing.assert_array_equal(pair.stages["mask"], expected["tree_mask"])
    np.testing.assert_array_equal(pair.stages["chain"].tokens_bn[:, 1:], expected["chain_tokens"][:, 1:])


@pytest.mark.parametrize("pair, builder, ids, accept", [
    slow_unless(name == "b_trained", name, "best-first", "generate_ids", "generate_accept") for name in CONFORMANCE
] + [slow("b_trained", "chain", "chain_ids", "chain_accept")], indirect=["pair"])  # fmt: skip
def test_generation(pair, builder, ids, accept):
    settings, prompt = pair.settings, pair.expected["prompt"][0].tolist()
    sizes = {"candidates": settings["top_m"], "children": settings["top_k"], "stop_ids": settings["stop_token_ids"]}
    sizes |= {"ngrams": 0, "nodes": settings["tree_size"]} if builder == "best-first" else {}
    [result] = pair.model.generate(prompt, builder=builder, max_new_tokens=settings["max_new_tokens"], **sizes)
    assert prompt + result.ids == pair.expected[ids].ravel().tolist()
    assert result.accepted_before_cut == pair.expected[accept].tolist()
