"""EAGLE-3 against numbers of a PyTorch implementation, for every published form; its context, its levels, its tree.

tests/data/eagle3 has one folder per form, as it is published, with expected.npz beside it: features and tokens of two
sequences, what the layer gives for every position, and three steps more, each on the likeliest token of the step before.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DATA

from treeflash_jax import drafters, trees
from treeflash_jax.core.devices import Device
from treeflash_jax.drafters import Inputs, eagle3
from treeflash_jax.drafters.lanes import LaneSettings
from treeflash_jax.engine.settings import GenerateConfig
from treeflash_jax.formats import models

FOLDER = DATA / "eagle3"
FORMS = sorted(path.name for path in FOLDER.iterdir())
TOLERANCE = 1e-4
SLOTS, STEPS = 16, 3


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def opened(form: str):
    """Config, weights and expected numbers of a folder; the verifier's tables, which the folder may lack."""
    config, params = models.load_drafter(FOLDER / form, dtype=jnp.float64)
    expected = dict(np.load(FOLDER / form / "expected.npz"))
    tables = {"embed": jnp.asarray(expected["embed"], jnp.float64)} if "embed" in expected else {}
    return config, params, tables, expected


def drafted(params, tables, config, state, depths: int):
    """The expander of a state."""
    ones = jnp.ones(state.hidden_bd.shape[0])
    settings = LaneSettings(children=5, width=1)
    inputs = Inputs(params, tables, config, settings, state, jnp.zeros(len(ones), jnp.int32), ones, depths, None, None)
    return eagle3.draft(inputs, None)


@partial(jax.jit, static_argnames="config")
def run(params, tables, features_btj, tokens_bt, *, config):
    """The same positions in one call, one by one, and beside padding; then a few steps on the likeliest tokens."""
    batch, length = tokens_bt.shape
    extend = partial(drafters.of(config).extend, params, tables, config, attention="xla")
    nothing = eagle3.init(config, batch, SLOTS, jnp.float64)
    whole = extend(nothing, features_btj, tokens_bt, jnp.full(batch, length))

    def result(state, t):
        position = (jax.lax.dynamic_slice_in_dim(x_bt, t, 1, axis=1) for x_bt in (features_btj, tokens_bt))
        state = extend(state, *position, jnp.ones(batch, jnp.int32))
        return state, state.hidden_bd

    one_by_one, hidden_tbd = jax.lax.scan(result, nothing, jnp.arange(length))
    count_b = jnp.asarray([length - 2, 0])
    real_bt1 = (jnp.arange(length) < count_b[:, None])[..., None]
    padded = extend(nothing, jnp.where(real_bt1, features_btj, 1e3), tokens_bt, count_b)
    again = extend(one_by_one, features_btj, tokens_bt, jnp.zeros(batch, jnp.int32))

    expander = drafted(params, tables, config, whole, STEPS + 1)
    state, likeliest = expander.start(1), jnp.zeros((batch, 1), jnp.int32)
    steps = []
    for depth in range(STEPS):
        offered = expander.children(jnp.int32(depth), state)
        state = expander.follow(jnp.int32(depth), state, likeliest)
        steps.append((offered[0][:, 0, 0], offered[1][:, 0], state.carry[:, 0]))
    last = expander.children(jnp.int32(STEPS), state)
    return {
        "whole": whole, "one_by_one": one_by_one, "hidden": jnp.swapaxes(hidden_tbd, 0, 1), "padded": padded,
        "again": again, "steps": [jnp.stack(x, axis=1) for x in zip(*steps, strict=True)], "last": last[1][:, 0],
    }  # fmt: skip


@pytest.fixture(scope="module", params=FORMS)
def actual(request):
    config, params, tables, expected = opened(request.param)
    features, tokens = jnp.asarray(expected["features"], jnp.float64), jnp.asarray(expected["tokens"])
    return config, expected, jax.tree.map(np.asarray, run(params, tables, features, tokens, config=config))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))


def test_hidden_states_and_distributions_are_those_of_pytorch(actual):
    config, expected, got = actual
    np.testing.assert_allclose(got["hidden"], expected["hidden"], atol=TOLERANCE, rtol=0)
    tokens, log_probs, hidden = got["steps"]
    np.testing.assert_array_equal(tokens, expected["step_tokens"])
    np.testing.assert_allclose(hidden, expected["step_hidden"], atol=TOLERANCE, rtol=0)
    distributions = np.concatenate([expected["logits"][:, -1:], expected["step_logits"]], axis=1)
    best = np.sort(log_softmax(distributions), axis=-1)[..., ::-1][..., :5]
    got_distributions = np.concatenate([log_probs, got["last"][:, None]], axis=1)
    np.testing.assert_allclose(got_distributions, best, atol=TOLERANCE, rtol=0)


def test_positions_in_one_call_are_positions_one_by_one(actual):
    _, _, got = actual
    whole, single = got["whole"], got["one_by_one"]
    length = got["hidden"].shape[1]
    np.testing.assert_allclose(whole.hidden_bd, single.hidden_bd, atol=1e-12)
    assert (whole.context.length_b == length).all() and (single.context.length_b == length).all()
    for x, y in zip(jax.tree.leaves(whole.context.groups), jax.tree.leaves(single.context.groups), strict=True):
        np.testing.assert_allclose(x[:, :, :length], y[:, :, :length], atol=1e-12)
    jax.tree.map(np.testing.assert_array_equal, got["again"].hidden_bd, single.hidden_bd)
    assert (got["again"].context.length_b == length).all()


def test_padding_changes_nothing(actual):
    """A sequence with fewer positions, and one with none."""
    _, _, got = actual
    padded, length = got["padded"], got["hidden"].shape[1] - 2
    np.testing.assert_array_equal(padded.context.length_b, [length, 0])
    np.testing.assert_allclose(padded.hidden_bd[0], got["hidden"][0, length - 1], atol=1e-12)
    np.testing.assert_array_equal(padded.hidden_bd[1], 0)
    for x, y in zip(jax.tree.leaves(padded.context.groups), jax.tree.leaves(got["whole"].context.groups), strict=True):
        np.testing.assert_allclose(x[0, :, :length], y[0, :, :length], atol=1e-12)


def test_every_node_has_the_distribution_of_its_path_run_alone():
    config, params, tables, expected = opened("speculators")
    features, tokens = jnp.asarray(expected["features"], jnp.float64), jnp.asarray(expected["tokens"])
    depths = 4

    @jax.jit
    def run(params, tables):
        state = eagle3.init(config, 2, SLOTS, jnp.float64)
        state = eagle3.extend(params, tables, config, state, features, tokens, jnp.asarray([6, 3]), attention="xla")
        expander = drafted(params, tables, config, state, depths)
        grown = trees.best_first(expander, jnp.zeros(2, jnp.int32), 14, lanes=3)

        def along(path_bi):
            """Log-probabilities of tokens, each after those before it."""
            state, scores = expander.start(1), []
            for depth in range(depths):
                tokens_b1c, log_probs_b1c = expander.children(jnp.int32(depth), state)
                child_b1 = jnp.argmax(tokens_b1c == path_bi[:, depth, None, None], axis=-1).astype(jnp.int32)
                scores.append(jnp.take_along_axis(log_probs_b1c, child_b1[..., None], axis=2)[:, 0, 0])
                state = expander.follow(jnp.int32(depth), state, child_b1)
            return jnp.stack(scores, axis=1)

        parent_bn, path_bni = grown.parent_bn, jnp.zeros((2, 14, depths), jnp.int32)
        for node in range(1, 14):
            above_bi = trees.pick(path_bni, parent_bn[:, node, None])[:, 0]
            at_bi = jnp.arange(depths) == grown.depth_bn[:, node, None] - 1
            path_bni = path_bni.at[:, node].set(jnp.where(at_bi, grown.tokens_bn[:, node, None], above_bi))
        return grown, jnp.swapaxes(jax.lax.map(along, jnp.swapaxes(path_bni, 0, 1)), 0, 1)

    grown, scores_bni = jax.tree.map(np.asarray, run(params, tables))
    assert grown.valid_bn.all() and grown.depth_bn.max() > 2
    for b in range(2):
        for node in range(1, 14):
            np.testing.assert_allclose(
                grown.log_prob_bn[b, node], scores_bni[b, node, : grown.depth_bn[b, node]].sum(), atol=1e-10
            )


def test_a_draft_may_be_deeper_and_offer_fewer_tokens():
    config = opened("eagle")[0]
    sizes, settings = eagle3.choose(config, GenerateConfig(depths=4, children=3), Device("gpu"))
    assert sizes == replace(config, num_depths=4) and settings == LaneSettings(children=3, width=10)
    with pytest.raises(ValueError, match=f"got children {config.draft_vocab_size + 1}, expected"):
        eagle3.choose(config, GenerateConfig(children=config.draft_vocab_size + 1), Device("gpu"))
