"""Decoding with an EAGLE-3 drafter: full acceptance of exact drafts, its context, its files. See test_every_drafter.py."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import prefilled
from conftest import DATA
from test_every_drafter import ACCEPTED, FEW_TOKENS, accepted_pair
from test_every_drafter import float64 as float64

import treeflash_jax as tf
from treeflash_jax.core import parameters
from treeflash_jax.decoding import loops
from treeflash_jax.decoding.state import Weights
from treeflash_jax.drafters import eagle3
from treeflash_jax.formats import models
from treeflash_jax.models import verifier

VERIFIER, DRAFTER = FEW_TOKENS, ACCEPTED["eagle3"]
PROMPTS = [[3, 4, 5, 6, 7], [8], [2, 9, 4, 4, 1, 0, 3, 5, 7, 6, 2]]


def oracle(lookahead: float) -> tf.TreeFlash:
    """Returns a verifier that continues token t with t + 1, by far the likeliest, and an EAGLE-3 drafter that agrees.

    The verifier's layers add nothing. Queries and keys of the drafter's layer are equal at all positions, and so large that
    after the rotation every position attends to itself only; its values replace the carried state by the embedded token.
    Embeddings consist of +1 and -1, which normalisation does not change.

    Args:
      lookahead: share of the carried state that is left; 0 makes the drafter exact.
    """
    with jax.enable_x64(True):
        sizes, d = replace(VERIFIER, num_kv_heads=4), VERIFIER.hidden_size
        config = eagle3.EagleConfig(
            layers=replace(sizes, num_layers=1), target_hidden_size=d, draft_vocab_size=12, num_depths=5
        )
        config = replace(config, taps=(0, 0, 1)).fitted(sizes)
        specs = verifier.specs(sizes), eagle3.specs(config)
        weights, drafter = (parameters.initialize(spec, jax.random.key(5), jnp.float64, scale=0.5) for spec in specs)
        weights["embed"] = jax.random.rademacher(jax.random.key(6), (12, d), jnp.float64).at[:, 0].set(1)
        [group] = weights["groups"]
        group[:] = [layer | {name: jnp.zeros_like(layer[name]) for name in ("o", "down")} for layer in group]
        layer = drafter["layer"]
        for name in ("q", "k"):
            layer[name] = jnp.zeros_like(layer[name]).at[:, :2, 0].set(1)
            layer[f"{name}_norm"] = jnp.full_like(layer[f"{name}_norm"], 40)
        layer["v"] = jnp.concatenate([jnp.eye(d), (lookahead - 1) * jnp.eye(d)], axis=1).reshape(layer["v"].shape)
        layer["o"] = jnp.eye(d).reshape(layer["o"].shape)
        weights["unembed"] = jnp.roll(weights["embed"], 1, axis=0)
        drafter |= {"fc": jnp.zeros_like(drafter["fc"]), "unembed": weights["unembed"]}
        layer["down"] = jnp.zeros_like(layer["down"])
        return tf.TreeFlash(sizes, Weights(weights, drafter), drafter=config, stop_ids=())


@pytest.mark.parametrize(
    "how", [{"nodes": 17}, pytest.param({"builder": "walk", "depths": 3}, marks=pytest.mark.slow)], ids=str
)
def test_a_drafter_with_the_verifiers_distribution_is_accepted_to_full_depth(how):
    with jax.enable_x64(True):
        how = {"max_new_tokens": 40, "drafter_temperature": 0.02, "children": 4} | how
        [result] = oracle(0.0).generate([[3, 4, 5]], **how)
        assert result.ids == [(6 + i) % 12 for i in range(40)]
        assert {*result.accepted_before_cut[:-1]} == {how.get("depths", 5) + 1}
        [other] = oracle(2.0).generate([[3, 4, 5]], **how)
        assert other.ids == result.ids and other.tau < result.tau, "control: another law is not"


def test_the_drafter_is_shown_every_token_once(float64):
    """After a few rounds its context has the length of the verifier's, and equals that of one prefill of the text."""
    wide = accepted_pair("eagle3")
    plan, state = prefilled(wide, PROMPTS, nodes=12, lanes=4, children=6)
    state = loops.decode(wide.weights, state, jnp.int32(4), plan=plan)
    end_b, drafter = np.asarray(state.end_b), state.drafter
    np.testing.assert_array_equal(drafter.context.length_b, end_b - 1)
    assert (end_b > [len(prompt) + 4 for prompt in PROMPTS]).any()
    size = int(end_b.max()) - 1

    @jax.jit
    def at_once(weights, tokens_bt, count_b):
        out = verifier.forward(
            weights.verifier, VERIFIER, tokens_bt[:, :-1], jnp.broadcast_to(jnp.arange(size), (3, size)),
            verifier.causal_mask(3, size), taps=DRAFTER.taps,
        )  # fmt: skip
        nothing, tables = eagle3.init(DRAFTER, 3, 256, jnp.float64), weights.verifier
        return eagle3.extend(
            weights.drafter, tables, DRAFTER, nothing, out.features_btj, tokens_bt[:, 1:], count_b, attention="xla"
        )

    whole = at_once(wide.weights, state.tokens_bs[:, : size + 1], jnp.asarray(end_b - 1))
    np.testing.assert_allclose(drafter.hidden_bd, whole.hidden_bd, atol=1e-10)
    for x, y in zip(jax.tree.leaves(drafter.context.groups), jax.tree.leaves(whole.context.groups), strict=True):
        for b, end in enumerate(end_b):
            np.testing.assert_allclose(x[b, :, : end - 1], y[b, :, : end - 1], atol=1e-10)


def test_a_folder_loads_with_its_verifier(tmp_path):
    """By `load`, whose layer ids follow from the verifier; a misfit is refused before any weight is read."""
    form = DATA / "eagle3" / "eagle"
    sizes = replace(VERIFIER, vocab_size=48, hidden_size=12, num_layers=6)
    models.save_verifier(tmp_path / "verifier", sizes, parameters.initialize(verifier.specs(sizes), jax.random.key(0)))
    model = tf.load(verifier=tmp_path / "verifier", drafter=form, dtype="float32")
    assert model.drafter.taps == (1, 2, 2) and model.weights.drafter["offsets"].dtype == jnp.int32
    with pytest.raises(ValueError, match="hidden size"):
        tf.load("tiny", drafter=form)
