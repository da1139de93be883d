"""Steering of a small language model: the published mathematics, what it must not change, files and refusals."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DATA, RANDOM_MODEL

import treeflash_jax as tf
from treeflash_jax import params
from treeflash_jax.decoding.state import Weights
from treeflash_jax.drafters import language_model as own
from treeflash_jax.drafters import steering
from treeflash_jax.formats import models
from treeflash_jax.formats import steering as files
from treeflash_jax.verifiers import forward as verifier

SMALL = replace(RANDOM_MODEL, num_layers=2, intermediate_size=24)
SIZES = steering.SteeringConfig(taps=(0, 1, 2), width=32, num_layers=2, ffn=24)
CONFIG = own.LanguageModelConfig(layers=SMALL, steering=SIZES)
TEXTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11, 12] * 5, [13]]
pytestmark = pytest.mark.filterwarnings("ignore:tau is")


@pytest.fixture(autouse=True)
def float64():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def fresh(specs, seed, scale=0.3, dtype=jnp.float64):
    return params.initialize(specs, jax.random.key(seed), dtype, scale)


def steers(config, scale=0.1, dtype=jnp.float64):
    """Random weights, also those that start at zero."""
    made = jax.tree.map(lambda spec: replace(spec, init="normal"), steering.specs(config), is_leaf=params.is_spec)
    return fresh(made, 7, scale, dtype)


def test_shifts_and_logits_are_those_of_the_published_mathematics():
    stored = np.load(DATA / "steering.npz")
    config, weights = models.load_verifier(DATA / "qwen2", dtype=jnp.float32)
    own_weights = {name: jnp.asarray(stored[name]) for name in ("mix", "mix_bias", "norm", "norm_bias", "project")}
    normed_btd = steering.normed(own_weights, jnp.asarray(stored["features"])[:, None])
    shift_byf = steering.shifts(own_weights, normed_btd[:, 0])
    np.testing.assert_allclose(shift_byf[0], stored["shifts"], atol=1e-5)
    for layer in range(config.num_layers):
        np.testing.assert_allclose(
            steering.layer_shifts(own_weights, normed_btd)(layer)[0, 0], shift_byf[0, layer], atol=1e-6
        )
    tokens = jnp.asarray(stored["tokens"])
    size = tokens.shape[1]
    out = verifier.forward(
        weights,
        config,
        tokens,
        jnp.arange(size)[None],
        verifier.causal_mask(1, size),
        shift=lambda i: shift_byf[:, None, i],
    )
    np.testing.assert_allclose(verifier.logits(weights, out.hidden_btd), stored["logits"], atol=1e-4)


def test_two_factors_are_their_product():
    config = replace(SIZES, rank=5)
    factors = steers(config)
    whole = {name: x for name, x in factors.items() if name not in ("down", "up")}
    whole["project"] = jnp.einsum("dr,ryf->dyf", factors["down"], factors["up"])
    rows_bd = fresh(params.Spec((3, 32), (None, None)), 1)
    np.testing.assert_allclose(steering.shifts(factors, rows_bd), steering.shifts(whole, rows_bd), atol=1e-12)
    of_layer = [steering.layer_shifts(factors, rows_bd[:, None])(i)[:, 0] for i in range(2)]
    np.testing.assert_allclose(jnp.stack(of_layer, axis=1), steering.shifts(whole, rows_bd), atol=1e-12)


def test_rows_keep_what_steered_them_however_they_are_read():
    """The last row of every call runs under the new state, those before it under the old one; the prompt under none."""
    weights = fresh(verifier.specs(SMALL), 2) | {"steering": steers(SIZES)}
    extend = jax.jit(partial(own.extend, weights, None, CONFIG))
    tokens_bt = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 9)))
    features_btj = fresh(params.Spec((2, 9, 96), (None, None, None)), 3)
    state = extend(own.init(CONFIG, 2, 32, jnp.float64), None, tokens_bt[:, :3], jnp.asarray([3, 3]))
    assert not np.any(state.shift_byf)
    once = extend(state, features_btj[:, 3:7], tokens_bt[:, 3:7], jnp.asarray([4, 2]))
    untouched = extend(once, features_btj[:, :1], tokens_bt[:, :1], jnp.zeros(2, int))
    jax.tree.map(np.testing.assert_array_equal, untouched.replace(context=None), once.replace(context=None))
    np.testing.assert_array_equal(untouched.context.length_b, [7, 5])
    shift = np.zeros((2, 9, 2, 24))
    for b, count in enumerate((4, 2)):
        last = features_btj[b, 2 + count][None, None]
        own_shift = steering.shifts(weights["steering"], steering.normed(weights["steering"], last)[:, 0])[0]
        np.testing.assert_allclose(once.shift_byf[b], own_shift, atol=1e-12)
        shift[b, 2 + count] = own_shift
    whole = verifier.forward(
        weights, SMALL, tokens_bt[:, :7], jnp.arange(7)[None], verifier.causal_mask(2, 7),
        shift=lambda i: jnp.asarray(shift[:, :7, i]),
    )  # fmt: skip
    for b, count in enumerate((4, 2)):
        np.testing.assert_allclose(once.hidden_bd[b], whole.hidden_btd[b, 2 + count], atol=1e-12)


def pair(scale: float) -> tf.TreeFlash:
    """A verifier, and its own first two layers with noise on them as a steered drafter; scale 0 steers nothing."""
    weights = fresh(verifier.specs(RANDOM_MODEL), 0)
    cut = weights | {"groups": [[layer | {"up": layer["up"] * 1.1} for layer in weights["groups"][0][:2]]]}
    config = replace(CONFIG, layers=replace(RANDOM_MODEL, num_layers=2), steering=replace(SIZES, ffn=64))
    own_steering = steering.start(fresh(steering.specs(config.steering), 5))
    if scale:
        own_steering = steers(config.steering, scale)
    return tf.TreeFlash(RANDOM_MODEL, Weights(weights, cut | {"steering": own_steering}), drafter=config)


@pytest.mark.parametrize("how", [{"nodes": 8}, pytest.param({"builder": "walk"}, marks=pytest.mark.slow)], ids=str)
def test_steering_changes_drafts_and_never_the_answer(how):
    steered, still = pair(0.3), pair(0.0)
    model = {name: tree for name, tree in still.weights.drafter.items() if name != "steering"}
    unsteered = replace(still.drafter, steering=None)
    plain = tf.TreeFlash(still.verifier, Weights(still.weights.verifier, model), drafter=unsteered)
    settings = {"max_new_tokens": 24, "stop_ids": (), "children": 8, "temperature": [0.0, 0.7, 1.2], "seed": 3}
    expected = plain.generate(TEXTS, builder="none", batch_size=3, **settings)
    found = [model.generate(TEXTS, batch_size=3, **how, **settings) for model in (plain, still, steered)]
    for results in found:
        assert [result.ids for result in results] == [result.ids for result in expected]
    lengths = [[result.accept_lengths for result in results] for results in found]
    assert lengths[0] == lengths[1] != lengths[2]


def test_folders_hold_the_model_and_its_steering(tmp_path):
    jax.config.update("jax_enable_x64", False)
    weights = fresh(verifier.specs(RANDOM_MODEL), 0, dtype=jnp.float32)
    models.save_verifier(tmp_path / "verifier", RANDOM_MODEL, weights, jnp.float32)
    small = fresh(verifier.specs(SMALL), 2, dtype=jnp.float32)
    for name, sizes in (("full", SIZES), ("low", replace(SIZES, rank=3))):
        made = steers(sizes, dtype=jnp.float32)
        config = replace(CONFIG, steering=sizes)
        models.save_drafter(tmp_path / name, config, small | {"steering": made}, dtype=jnp.float32)
        stored, read = models.load_drafter(tmp_path / name)
        assert stored == config
        jax.tree.map(np.testing.assert_array_equal, read, small | {"steering": made})
    assert models.load_verifier(tmp_path / "full")[0] == SMALL, "other programs read the model as it is"
    models.save_drafter(tmp_path / "plain", replace(CONFIG, steering=None), small, dtype=jnp.float32)
    beside = tf.load(tmp_path / "verifier", drafter=tmp_path / "plain", steering=tmp_path / "low", dtype="float32")
    assert beside.drafter.steering.rank == 3 and "down" in beside.weights.drafter["steering"]


def test_steering_that_does_not_fit_is_refused(tmp_path):
    files.save(tmp_path, SIZES, steers(SIZES), jnp.float32)
    other = replace(RANDOM_MODEL, hidden_size=16)
    for config, model, says in (
        (CONFIG, other, r"\(32, 2, 24\) .* expected \(16, 2, 24\)"),
        (replace(CONFIG, steering=replace(SIZES, taps=(0, 1, 3))), RANDOM_MODEL, r"layers \[0, 1, 3\], expected 0 to 2"),
        (replace(CONFIG, layers=replace(SMALL, num_experts=4)), RANDOM_MODEL, "expected a dense model"),
    ):
        with pytest.raises(ValueError, match=says):
            config.fitted(model)
    with pytest.raises(ValueError, match="got steering with a drafter of kind 'block'"):
        tf.load("tiny", steering=tmp_path)
    with pytest.raises(ValueError, match="and no drafter"):
        tf.load("tiny", drafter="none", steering=tmp_path)
    with pytest.raises(ValueError, match="got no steering_config.json"):
        tf.load("tiny", drafter=DATA / "qwen2", steering=DATA)
    (tmp_path / "steering_config.json").write_text('{"taps": [0, 1], "width": 32, "num_layers": 2, "ffn": 24}')
    with pytest.raises(ValueError, match=r"got taps \[0, 1\], expected three"):
        files.read_config(tmp_path)
