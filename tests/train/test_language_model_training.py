"""Distillation and steering of language-model drafters: the loss, what is written, and settings that are refused."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_training
from answers import random_weights
from refusals import refused
from toy_training import MODEL

from train.data import packing
from train.language_model import LanguageModelStage, drafted_shifts, language_model_sums
from train.runtime import run_config
from train.stages import drafting, registry
from treeflash_jax.core import parameters
from treeflash_jax.drafters import LanguageModelDrafter, steering
from treeflash_jax.drafters.steering import Steering
from treeflash_jax.formats import model_files
from treeflash_jax.models import decoder, quantized

ROWS = packing.PackedBatch(
    tokens_bt=np.int32([[5, 6, 7, 8, 9, 10, 11, 12, 13, 14]]),
    segments_bt=np.int32([[1, 1, 1, 1, 1, 1, 2, 2, 2, 2]]),
    positions_bt=np.int32([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3]]),
    weights_bt=np.float32([[0, 0, 1, 1, 1, 1, 0, 0, 1, 1]]),
)
DRAFTER = LanguageModelDrafter(layers=replace(MODEL, num_layers=2))
STEERED = replace(DRAFTER, steering=Steering(taps=(0, 1, 2), width=MODEL.hidden_size))


@pytest.fixture(scope="module")
def toml(toy):
    """The settings of a stage on the toy verifier and its responses."""
    lines = ("num_layers = 2", "chunk = 16")
    return toy_training.write_stage(toy.parent, 'stage = "language_model"', *lines, without=("drafter", "objective"))


@pytest.fixture(scope="module")
def case():
    """Weights of the verifier and of its first two layers, a padded batch and its key."""
    weights = random_weights(decoder.specs(MODEL))
    batch = jax.tree.map(lambda x: np.pad(x, ((0, 0), (0, 22))), ROWS)
    return weights, weights | {"groups": [weights["groups"][0][:2]]}, batch, jax.random.split(jax.random.key(2), 1)


def test_a_sample_of_all_tokens_gives_the_loss_over_the_vocabulary(toml, case):
    """And weights of tokens are those of their losses."""
    weights, small, batch, keys = case
    lighter = np.where(batch.positions_bt == 3, 0.25, 1)
    batch = replace(batch, weights_bt=batch.weights_bt * lighter)

    def sums(vocabulary):
        settings = registry.read_stage(toml, [f"vocabulary={vocabulary}", "loss=forward-kl"])
        arguments = dict(settings=settings, verifier=MODEL, drafter=DRAFTER)
        return jax.jit(partial(language_model_sums, **arguments))(small, {"verifier": weights}, batch, keys)

    whole, every, some = (sums(size) for size in (0, MODEL.vocab_size, 40))
    assert 0 < whole["overlap"][0] < whole["overlap"][1] and whole["loss"][1] == 6 - 2 * 0.75
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), every, whole)
    assert abs(some["loss"][0] / whole["loss"][0] - 1) > 1e-3 and some["loss"][1] == whole["loss"][1]


def test_a_token_is_shifted_from_a_few_tokens_back_within_its_document():
    """By hand: the state at max(t - distance, start) shifts token t, if the token after it is the verifier's.

    Weights of prompts do not make them the verifier's.
    """
    batch = replace(ROWS, weights_bt=np.maximum(ROWS.weights_bt, 0.5 * (ROWS.positions_bt > 0)))
    features_btj = jax.random.normal(jax.random.key(3), (1, 10, 3 * MODEL.hidden_size))
    weights = random_weights(STEERED.specs()["steering"])
    [every, _] = steering.make_shifts(weights, features_btj)
    seen = set()
    for seed in range(12):
        keys_b = jax.random.split(jax.random.key(seed), 1)
        [got, _] = drafted_shifts(weights, batch, keys_b, features_btj, depths=3)
        for distance in (1, 2, 3):
            source_t = [max(t - distance, 0 if t < 6 else 6) for t in range(10)]
            expected = np.asarray([0, 1, 1, 1, 1, 0, 0, 1, 1, 0])[None, :, None] * every[:, np.asarray(source_t)]
            if np.allclose(got, expected, atol=1e-5):
                seen.add(distance)
                break
        else:
            pytest.fail("no distance explains the shifts")
    assert seen == {1, 2, 3}


def test_steering_learns_from_zero_first_its_projection_then_its_mix(toml, case):
    settings, (weights, small, batch, keys) = registry.read_stage(toml, ["steering=joint"]), case
    assert settings.drafter_config(MODEL, None) == STEERED and steering.default_taps(32) == (2, 15, 28)
    maps = [STEERED.specs()["steering"]["mix"], *STEERED.specs()["steering"]["project"]]
    assert [spec.outputs for spec in maps] == 3 * [(0,)], "Muon trains them: AdamW, at the rate of tables, overshoots"
    steers = settings.fresh(STEERED, weights, {})["steering"]
    np.testing.assert_array_equal(steers["mix"], np.tile(np.eye(MODEL.hidden_size), 3))

    @jax.jit
    @jax.value_and_grad
    def loss(steers, frozen):
        arguments = dict(settings=settings, verifier=MODEL, drafter=STEERED)
        total, weight = language_model_sums({"steering": steers}, frozen, batch, keys, **arguments)["loss"]
        return total / weight

    frozen = {"verifier": weights} | small
    before, first = loss(steers, frozen)
    assert all(map(jnp.any, first["project"])) and not jnp.any(first["mix"])
    moved = steers | {"project": [x - 0.3 * slope for x, slope in zip(steers["project"], first["project"], strict=True)]}
    after, second = loss(moved, frozen)
    assert after < before and jnp.any(second["mix"]) and jnp.any(second["norm_bias"])


def test_layers_of_a_quantised_verifier_are_expanded(toml, case):
    settings, specs = registry.read_stage(toml, []), decoder.specs(MODEL)
    compress = partial(quantized.compress, scheme="int4")
    kept = jax.tree.map(lambda spec, weight: compress(weight, spec), specs, case[0], is_leaf=parameters.is_spec)
    expected = quantized.expand(specs, kept)["groups"][0][:2]
    jax.tree.map(np.testing.assert_array_equal, settings.fresh(DRAFTER, kept, {})["groups"], [expected])


@pytest.mark.slow
def test_a_steered_run_that_is_stopped_ends_as_it_would_have(toml, tmp_path, monkeypatch):
    """Bit for bit; what is exported and loaded drafts losslessly. Alone, steering leaves the small model as it was."""
    words = "steering=joint", "loop.steps=6", "loop.log_every=1"
    whole, cut = (registry.read_stage(toml, [f"run={tmp_path}/{name}", *words]) for name in ("whole", "cut"))
    drafting.train(whole)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(packing, "batches", packing.batches)  # put back afterwards
        toy_training.terminate_after(3)
        drafting.train(cut)
    drafting.train(cut)
    assert toy_training.read_log(whole.run) == toy_training.read_log(cut.run)
    whole, cut = (model_files.load_drafter(f"{stage.run}/model")[1] for stage in (whole, cut))
    jax.tree.map(np.testing.assert_array_equal, whole, cut)
    words = f"run={tmp_path}/alone", f"language_model={tmp_path}/whole/model", "steering=alone", "loop.steps=3"
    drafting.train(registry.read_stage(toml, words))
    drafter = toy_training.exported(tmp_path / "alone", toml.parent / "verifier").weights.drafter
    jax.tree.map(np.testing.assert_array_equal, *({**weights, "steering": 0} for weights in (whole, drafter)))
    assert not np.array_equal(drafter["steering"]["project"][0], whole["steering"]["project"][0])


@pytest.mark.slow
def test_a_model_cut_from_its_verifier_is_distilled_then_trained_on(toml, tmp_path):
    evaluate = "evaluate={prompts = 1, nodes = [4], new_tokens = 4}"
    words = [f"run={tmp_path}/first", "loop.steps=20", "loop.log_every=1", evaluate]
    drafting.train(registry.read_stage(toml, words))
    log = toy_training.read_log(tmp_path / "first")
    assert np.mean([line["loss"] for line in log[-5:]]) < 0.9 * np.mean([line["loss"] for line in log[:5]])
    assert log[-1]["held_out/tau_4"] >= 1 and 0 < log[-1]["held_out/overlap"] < 1
    words = [f"run={tmp_path}/second", f"language_model={tmp_path}/first/model", "loop.steps=3", "loop.log_every=1"]
    drafting.train(registry.read_stage(toml, words))
    again = toy_training.read_log(tmp_path / "second")
    assert again[0]["loss"] < 0.9 * log[0]["loss"], "it goes on from the first run's weights"
    assert toy_training.exported(tmp_path / "second", toml.parent / "verifier").drafter.kind == "language_model"


def test_settings_that_train_nothing_or_fit_nothing_are_refused(toml):
    for words, says in (
        (("chunk=5",), "chunk 5, expected a divisor"),
        (("vocabulary=-1",), "vocabulary"),
        (("steering=alone",), "got steering=alone and no language_model"),
    ):
        refused(partial(run_config.load, LanguageModelStage, toml, words), says)
    refused(
        lambda: registry.read_stage(toml, ["num_layers=4"]).drafter_config(MODEL, None), "num_layers 4, expected at most 3"
    )
    stage = registry.read_stage(toml, [f"language_model={toml.parent}/drafter"])
    refused(lambda: drafting.read_drafter_config(stage, MODEL), "got a drafter of kind 'block', expected a language model")
