"""EAGLE-3 against numbers of a PyTorch implementation, for every published form; its context, its tree, decoding.

tests/data/eagle3 has one folder per form, as it is published, with expected.npz beside it: features and tokens of two
sequences, what the layer gives for every position, and three steps more, each on the likeliest token of the step before.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import assert_same_positions, slow_unless
from conftest import DATA, FEW_TOKENS
from draft_trees import grow, paths
from refusals import refused
from scipy.special import log_softmax

from treeflash_jax import TreeFlash
from treeflash_jax.core import parameters
from treeflash_jax.core.devices import Device
from treeflash_jax.decoding.state import Weights
from treeflash_jax.drafters import Eagle3Drafter, Inputs, NewPositions
from treeflash_jax.engine.settings.generate_config import GenerateConfig
from treeflash_jax.engine.settings.plan import resolve
from treeflash_jax.formats import model_files
from treeflash_jax.models import decoder

FOLDER = DATA / "eagle3"
FORMS = sorted(path.name for path in FOLDER.iterdir())
TOLERANCE = 1e-4
SLOTS, STEPS = 16, 3
pytestmark = pytest.mark.usefixtures("float64")


def opened(form: str):
    """Config, weights and expected numbers of a folder; the verifier's tables, which the folder may lack."""
    config, params = model_files.load_drafter(FOLDER / form, dtype=jnp.float64)
    expected = dict(np.load(FOLDER / form / "expected.npz"))
    tables = {"embed": jnp.asarray(expected["embed"], jnp.float64)} if "embed" in expected else {}
    return config, params, tables, expected


def drafted(params, tables, config, state, depths: int):
    """The expander of a state."""
    ones = jnp.ones(state.hidden_bd.shape[0])
    inputs = Inputs(params, tables, state, jnp.zeros(len(ones), jnp.int32), ones, depths, None, None)
    return config.configured(children=5).draft(inputs)


@partial(jax.jit, static_argnames="config")
def run(params, tables, features_btj, tokens_bt, *, config):
    """The same positions in one call, one by one, and beside padding; then a few steps on the likeliest tokens."""
    batch, length = tokens_bt.shape

    def extend(state, *new):
        return config.extend(params, tables, state, NewPositions(*new))

    nothing = config.init(batch, SLOTS, jnp.float64)
    whole = extend(nothing, features_btj, tokens_bt, jnp.full(batch, length))

    def result(state, t):
        position = (jax.lax.dynamic_slice_in_dim(x_bt, t, 1, axis=1) for x_bt in (features_btj, tokens_bt))
        state = extend(state, *position, jnp.ones(batch, jnp.int32))
        return state, state.hidden_bd

    one_by_one, hidden_tbd = jax.lax.scan(result, nothing, jnp.arange(length))
    count_b = jnp.asarray([length - 2, 0])
    real_bt1 = (jnp.arange(length) < count_b[:, None])[..., None]
    padded = extend(nothing, jnp.where(real_bt1, features_btj, 1e3), tokens_bt, count_b)

    expander = drafted(params, tables, config, whole, STEPS + 1)
    state, steps = expander.start(1), []
    for depth in range(STEPS):
        offered = expander.children(jnp.int32(depth), state)
        state = expander.follow_token(jnp.int32(depth), state, offered[0][..., 0])
        steps.append((offered[0][:, 0, 0], offered[1][:, 0], state.carry[:, 0]))
    last = expander.children(jnp.int32(STEPS), state)
    return {
        "whole": whole, "one_by_one": one_by_one, "hidden": jnp.swapaxes(hidden_tbd, 0, 1), "padded": padded,
        "steps": [jnp.stack(x, axis=1) for x in zip(*steps, strict=True)], "last": last[1][:, 0],
    }  # fmt: skip


# "angelslim" computes what "eagle" does.
@pytest.fixture(scope="module", params=[slow_unless(form != "angelslim", form) for form in FORMS])
def actual(request):
    with jax.enable_x64(True):
        config, params, tables, expected = opened(request.param)
        features, tokens = jnp.asarray(expected["features"], jnp.float64), jnp.asarray(expected["tokens"])
        return config, expected, jax.tree.map(np.asarray, run(params, tables, features, tokens, config=config))


def test_hidden_states_and_distributions_are_those_of_pytorch(actual):
    config, expected, got = actual
    np.testing.assert_allclose(got["hidden"], expected["hidden"], atol=TOLERANCE, rtol=0)
    tokens, log_probs, hidden = got["steps"]
    np.testing.assert_array_equal(tokens, expected["step_tokens"])
    np.testing.assert_allclose(hidden, expected["step_hidden"], atol=TOLERANCE, rtol=0)
    distributions = np.concatenate([expected["logits"][:, -1:], expected["step_logits"]], axis=1)
    best = np.sort(log_softmax(distributions.astype(np.float64), axis=-1), axis=-1)[..., ::-1][..., :5]
    got_distributions = np.concatenate([log_probs, got["last"][:, None]], axis=1)
    np.testing.assert_allclose(got_distributions, best, atol=TOLERANCE, rtol=0)


def test_positions_in_one_call_are_positions_one_by_one(actual):
    _, _, got = actual
    whole, single = got["whole"], got["one_by_one"]
    length = got["hidden"].shape[1]
    np.testing.assert_allclose(whole.hidden_bd, single.hidden_bd, atol=1e-12)
    assert (whole.context.length_b == length).all() and (single.context.length_b == length).all()
    assert_same_positions(whole.context, single.context, [length] * len(whole.hidden_bd))


def test_padding_changes_nothing(actual):
    """A sequence with fewer positions, and one with none."""
    _, _, got = actual
    padded, length = got["padded"], got["hidden"].shape[1] - 2
    np.testing.assert_array_equal(padded.context.length_b, [length, 0])
    np.testing.assert_allclose(padded.hidden_bd[0], got["hidden"][0, length - 1], atol=1e-12)
    np.testing.assert_array_equal(padded.hidden_bd[1], 0)
    assert_same_positions(padded.context, got["whole"].context, [length])


def test_every_node_has_the_distribution_of_its_path_run_alone():
    config, params, tables, expected = opened("speculators")
    features, tokens = jnp.asarray(expected["features"], jnp.float64), jnp.asarray(expected["tokens"])

    @jax.jit
    def build(params, tables):
        state = config.init(2, SLOTS, jnp.float64)
        state = config.extend(params, tables, state, NewPositions(features, tokens, jnp.asarray([6, 3])))
        expander = drafted(params, tables, config, state, depths=4)
        return expander, grow("best-first", expander, jnp.zeros(2, jnp.int32), 14, lanes=3)

    expander, grown = build(params, tables)
    children = jax.jit(lambda expander, depth, state: expander.children(depth, state))
    follow = jax.jit(lambda expander, depth, state, token_bw: expander.follow_token(depth, state, token_bw))
    assert grown.valid_bn.all() and grown.depth_bn.max() > 2
    for b in range(2):
        for path, log_prob in zip(paths(grown, b), grown.log_prob_bn[b], strict=True):
            state, total = expander.start(1), 0.0
            for depth, token in enumerate(path):
                tokens_b1c, log_probs_b1c = children(expander, jnp.int32(depth), state)
                total += log_probs_b1c[b, 0, jnp.argmax(tokens_b1c[b, 0] == token)]
                state = follow(expander, jnp.int32(depth), state, jnp.full((2, 1), token, jnp.int32))
            np.testing.assert_allclose(log_prob, total, atol=1e-10)


def test_a_draft_may_be_deeper_and_offer_fewer_tokens():
    config = opened("eagle")[0]
    assert config.configured(depths=4, children=3) == replace(config, num_depths=4, children=3)
    too_many = config.draft_vocab_size + 1
    refused(lambda: config.configured(children=too_many), f"got children {too_many}")


@pytest.mark.parametrize(
    ("options", "depths", "lanes"),
    [
        ({}, 4, 2),
        ({"depths": 6}, 6, 2),
        ({"lanes": 3}, 4, 3),
        ({"nodes": 8}, 4, 2),
        ({"nodes": 9}, 7, 10),
        ({"builder": "walk"}, 7, None),
    ],
    ids=str,
)
def test_the_default_tree_on_a_cpu_has_four_levels_of_two_lanes(options, depths, lanes):
    config, device = replace(opened("eagle")[0], num_depths=7), Device("cpu", features=frozenset({"avx512_bf16"}))
    settings = GenerateConfig(**{"builder": "best-first"} | options)
    plan = resolve(settings, config.layers, config, dtype=jnp.bfloat16, device=device)
    assert (plan.configured_drafter.num_depths, plan.shape.lanes) == (depths, lanes)


# Decoding


def oracle(lookahead: float) -> TreeFlash:
    """Returns a verifier that continues token t with t + 1, by far the likeliest, and an EAGLE-3 drafter that agrees.

    The verifier's layers add nothing. Queries and keys of the drafter's layer are equal at all positions, and so large that
    after the rotation every position attends to itself only; its values replace the carried state by the embedded token.
    Embeddings consist of +1 and -1, which normalisation does not change.

    Args:
      lookahead: share of the carried state that is left; 0 makes the drafter exact.
    """
    sizes, d = replace(FEW_TOKENS, num_kv_heads=4), FEW_TOKENS.hidden_size
    config = Eagle3Drafter(
        layers=replace(sizes, num_layers=1), target_hidden_size=d, draft_vocab_size=12, num_depths=5, taps=(0, 0, 1)
    ).fitted(sizes)
    specs = decoder.specs(sizes), config.specs()
    weights, drafter = (parameters.initialize(spec, jax.random.key(5), jnp.float64, scale=0.5) for spec in specs)
    weights["embed"] = jax.random.rademacher(jax.random.key(6), (12, d), jnp.float64).at[:, 0].set(1)
    [group] = weights["groups"]
    group[:] = [layer | {name: jnp.zeros_like(layer[name]) for name in ("o", "down")} for layer in group]
    layer = drafter["layer"]
    for name in ("q", "k"):
        layer[name] = jnp.zeros_like(layer[name]).at[:, :2, 0].set(1)
        layer[f"{name}_norm"] = jnp.full_like(layer[f"{name}_norm"], 40)
    layer["down"] = jnp.zeros_like(layer["down"])
    layer["v"] = jnp.concatenate([jnp.eye(d), (lookahead - 1) * jnp.eye(d)], axis=1).reshape(layer["v"].shape)
    layer["o"] = jnp.eye(d).reshape(layer["o"].shape)
    weights["unembed"] = jnp.roll(weights["embed"], 1, axis=0)
    drafter |= {"fc": jnp.zeros_like(drafter["fc"]), "unembed": weights["unembed"]}
    return TreeFlash(sizes, Weights(weights, drafter), drafter=config, stop_ids=())


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"nodes": 17}, {"builder": "walk", "depths": 3}], ids=str)
def test_a_drafter_with_the_verifiers_distribution_is_accepted_to_full_depth(how):
    how = {"max_new_tokens": 40, "drafter_temperature": 0.02, "children": 4} | how
    [result] = oracle(0.0).generate([[3, 4, 5]], **how)
    assert result.ids == [(6 + i) % 12 for i in range(40)]
    assert {*result.accepted_before_cut[:-1]} == {how.get("depths", 5) + 1}
    [other] = oracle(2.0).generate([[3, 4, 5]], **how)
    assert other.ids == result.ids and other.tau < result.tau, "control: another distribution is not"
