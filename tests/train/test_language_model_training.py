"""Distillation of language-model drafters and training of their steering: what is seen, what learns, what is written."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_training
from refusals import refused
from toy_training import MODEL

from train.data import packing
from train.language_model import LanguageModelStage, language_model_sums, training_shift
from train.runtime import run_config
from train.stages import drafting, registry
from treeflash_jax.core import parameters
from treeflash_jax.drafters import LanguageModelConfig, steering
from treeflash_jax.formats import model_files
from treeflash_jax.models import verifier
from treeflash_jax.trees import pick

ROWS = packing.Batch(
    tokens_bt=jnp.asarray([[5, 6, 7, 8, 9, 10, 11, 12, 13, 14]]),
    segments_bt=jnp.asarray([[1, 1, 1, 1, 1, 1, 2, 2, 2, 2]]),
    positions_bt=jnp.asarray([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3]]),
    weights_bt=jnp.asarray([[0, 0, 1, 1, 1, 1, 0, 0, 1, 1.0]]),
)
SIZES = steering.SteeringConfig(taps=(0, 1, 2), width=16, num_layers=2, ffn=32)
DRAFTER = LanguageModelConfig(layers=replace(MODEL, num_layers=2), steering=SIZES)


@pytest.fixture(scope="module")
def toml(toy):
    """The settings of a stage on the toy verifier and its responses."""
    lines = ("num_layers = 2", "train_model = true", "chunk = 16")
    return toy_training.write_stage(toy.parent, *lines, without=("drafter", "objective"))


@pytest.fixture(scope="module")
def case():
    """Weights of the verifier and of its first two layers, a padded batch and its key."""
    weights = parameters.initialize(verifier.specs(MODEL), jax.random.key(0), scale=0.3)
    batch = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 22))), ROWS)
    return weights, weights | {"groups": [weights["groups"][0][:2]]}, batch, jax.random.split(jax.random.key(2), 1)


def test_a_token_is_steered_from_a_few_tokens_back_within_its_document():
    """By hand: what steers token t is the state at max(t - offset, start), where the next token is the verifier's."""
    features_bsj = jax.random.normal(jax.random.key(3), (1, 10, 48))
    made = parameters.initialize(steering.specs(SIZES), jax.random.key(0), scale=0.5)
    made |= {"project": jax.random.normal(jax.random.key(1), made["project"].shape)}
    unshifted = steering.layer_shifts(made, steering.normed(made, features_bsj))
    seen = set()

    def expected(offset):
        source = jnp.asarray([[max(t - offset, 0 if t < 6 else 6) for t in range(10)]])
        return np.asarray([0, 1, 1, 1, 1, 0, 0, 1, 1, 0])[None, :, None] * pick(unshifted(1), source)

    for seed in range(12):
        shift_bt = training_shift(made, ROWS, jax.random.split(jax.random.key(seed), 1), features_bsj, offset=3)
        [offset] = [offset for offset in (1, 2, 3) if np.allclose(shift_bt(1), expected(offset), atol=1e-5)]
        seen.add(offset)
    assert seen == {1, 2, 3}
    farther = training_shift(made, ROWS, jax.random.split(jax.random.key(0), 1), features_bsj, offset=1000)
    assert np.all(np.isfinite(farther(0)))


def test_steering_learns_from_zero_first_its_projection_then_its_mix(toml, case):
    settings, (weights, small, batch, keys) = registry.read_stage(toml, ["steers=true"]), case
    assert isinstance(settings, LanguageModelStage)
    own_steering = steering.start(parameters.initialize(steering.specs(SIZES), jax.random.key(1), scale=0.3))

    @jax.jit
    def loss(own_steering, frozen):
        arguments = dict(settings=settings, verifier=MODEL, drafter=DRAFTER)
        total, weight = language_model_sums({"steering": own_steering}, frozen, batch, keys, **arguments)["loss"]
        return total / weight

    frozen = {"verifier": weights} | small
    before, first = jax.value_and_grad(loss)(own_steering, frozen)
    assert np.any(first["project"]) and not np.any(first["mix"])
    moved = own_steering | {"project": own_steering["project"] - 0.3 * first["project"]}
    after, second = jax.value_and_grad(loss)(moved, frozen)
    assert after < before and np.any(second["mix"]) and np.any(second["norm_bias"])


def test_a_sample_of_all_tokens_gives_the_loss_over_the_vocabulary(toml, case):
    weights, small, batch, keys = case

    def sums(vocabulary):
        settings = registry.read_stage(toml, [f"vocabulary={vocabulary}", "loss=forward-kl"])
        arguments = dict(settings=settings, verifier=MODEL, drafter=replace(DRAFTER, steering=None))
        return language_model_sums(small, {"verifier": weights}, batch, keys, **arguments)

    whole, every, some = (sums(size) for size in (0, MODEL.vocab_size, 40))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), every, whole)
    assert abs(some["loss"][0] / whole["loss"][0] - 1) > 1e-3 and some["loss"][1] == whole["loss"][1]


@pytest.mark.slow
def test_a_model_cut_from_its_verifier_is_distilled_then_steered(toml, tmp_path):
    evaluate = "evaluate={prompts = 1, nodes = [4], new_tokens = 4}"
    words = [f"run={tmp_path}/small", "loop.steps=20", "loop.log_every=1", evaluate]
    drafting.train(registry.read_stage(toml, words))
    log = toy_training.read_log(tmp_path / "small")
    assert np.mean([line["loss"] for line in log[-5:]]) < 0.9 * np.mean([line["loss"] for line in log[:5]])
    assert log[-1]["held_out/tau_4"] >= 1 and 0 < log[-1]["held_out/overlap"] < 1
    words = [f"run={tmp_path}/steered", f"language_model={tmp_path}/small/model", "train_model=false", "steers=true"]
    drafting.train(registry.read_stage(toml, [*words, "loop.steps=3", "rank=2"]))
    model = toy_training.exported(tmp_path / "steered", toml.parent / "verifier")
    for name, tree in model_files.load_drafter(tmp_path / "small" / "model")[1].items():
        kept = model_files.load_drafter(tmp_path / "out")[1][name]
        jax.tree.map(np.testing.assert_array_equal, kept, tree)
    assert np.any(np.asarray(model.weights.drafter["steering"]["up"]))


def test_settings_that_train_nothing_or_fit_nothing_are_refused(toml):
    for words, says in (
        (("train_model=false",), "nothing would be trained"),
        (("train_model=false", "steers=true"), "no language_model"),
        (("chunk=5",), "chunk 5, expected a divisor"),
        (("taps=[1, 2]",), "got 2 taps"),
        (("offset=0",), "offset"),
        (("rank=-1",), "rank"),
    ):
        refused(partial(run_config.load, LanguageModelStage, toml, words), says)
    refused(
        lambda: registry.read_stage(toml, ["num_layers=4"]).drafter_config(MODEL, None), "num_layers 4, expected at most 3"
    )
    stage = registry.read_stage(toml, [f"language_model={toml.parent}/drafter"])
    refused(lambda: drafting.read_drafter_config(stage, MODEL), "got a drafter of kind 'block', expected a language model")
