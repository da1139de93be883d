"""Steered language models: numbers of PyTorch, and steering that is zero. Losslessness: test_every_drafter.py.

data/steering holds a Llama model of two layers, its steering, and the logits of ten tokens: four of a prompt, which nothing
steers, four under the features of the prompt's last position, and two under those of a later one.
"""

import json
from dataclasses import asdict, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import random_weights
from conftest import DATA, RANDOM_MODEL
from refusals import refused
from safetensors.numpy import save_file
from scipy.special import log_softmax

import treeflash_jax as tf
from treeflash_jax.cli.commands import main
from treeflash_jax.core import parameters
from treeflash_jax.drafters import Inputs, LanguageModelConfig, steering
from treeflash_jax.formats import model_files
from treeflash_jax.formats.dialects import language_model_folder
from treeflash_jax.models import verifier

MODEL = {
    "model_type": "llama", "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
STEERING = {"taps": [0, 1, 2], "width": 12, "num_layers": 2, "ffn": 24, "rank": 0}


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    return dict(np.load(DATA / "steering" / "steering.npz"))


@pytest.fixture(scope="module")
def stored(expected, tmp_path_factory) -> tuple[LanguageModelConfig, dict]:
    """The model and its steering, read from files."""
    folder = tmp_path_factory.mktemp("steered")
    tensors = {name.removeprefix("tensor:"): value for name, value in expected.items() if name.startswith("tensor:")}
    steers = {name: tensors.pop(name) for name in [*tensors] if name.startswith("steering.")}
    save_file(tensors, folder / "model.safetensors")
    save_file(steers, folder / "steering.safetensors")
    (folder / "config.json").write_text(json.dumps(MODEL))
    (folder / "steering_config.json").write_text(json.dumps(STEERING))
    return model_files.load_drafter(folder)


def drafted_logits(config, weights, tokens_t, features_tj) -> np.ndarray:
    """Logits after the ninth token, which was read, and after the tenth, a position of a lane; of two equal sequences."""
    tokens_bt, features_btj = (jnp.stack([x, x]) for x in (tokens_t, features_tj))
    distributions = draft_twice(config, weights, tokens_bt, features_btj)
    return np.stack([np.take_along_axis(p, np.argsort(t), axis=-1)[:, 0] for t, p in distributions], axis=1)


@partial(jax.jit, static_argnums=0)
def draft_twice(config, weights, tokens_bt, features_btj) -> list[tuple[jax.Array, jax.Array]]:
    """The fifth token is read by one sequence after the other."""
    extend = partial(config.extend, weights, None, attention="xla")
    state = config.init(2, 32, jnp.float32)
    state = extend(state, None, tokens_bt[:, :4], jnp.asarray([4, 4]))
    for count_b in (jnp.asarray([1, 0]), jnp.asarray([0, 1])):
        state = extend(state, features_btj[:, :1] * count_b[:, None, None], tokens_bt[:, 4:5], count_b)
    padding = jnp.zeros((2, 2), tokens_bt.dtype), jnp.ones((2, 2, features_btj.shape[2]))
    padded = (jnp.concatenate(x, axis=1) for x in ((features_btj[:, 1:], padding[1]), (tokens_bt[:, 5:9], padding[0])))
    state = extend(state, *padded, jnp.asarray([4, 4]))
    inputs = Inputs(weights, None, state, tokens_bt[:, 8], jnp.ones(2), 2, tokens_bt, 9)
    expander = config.configured(children=40).draft(inputs)
    start = expander.start(1)
    child_bw = jnp.argmax(start.tokens_bwc == tokens_bt[:, 9, None, None], axis=-1)
    return [expander.children(0, start), expander.children(1, expander.follow(jnp.int32(0), start, child_bw))]


def test_a_steered_draft_is_that_of_pytorch(stored, expected):
    """Positions keep the shifts that they were run with, and features of padding have no effect."""
    config, weights = stored
    assert config.taps == (0, 1, 2)
    got = drafted_logits(config, weights, expected["tokens"], expected["features"])
    np.testing.assert_allclose(got, 2 * [log_softmax(expected["logits"][8:], axis=-1)], atol=1e-4)
    plain = log_softmax(expected["plain_logits"][8:], axis=-1)
    assert np.max(np.abs(got - plain)) > 0.1, "control: steering does something"


@pytest.mark.parametrize("rank", [0, 3])
def test_zero_steering_is_no_steering_bit_for_bit(stored, expected, rank):
    config, weights = stored
    fresh = replace(config, steering=replace(config.steering, rank=rank))
    zero = weights | {"steering": parameters.initialize(steering.specs(fresh.steering), jax.random.key(0))}
    plain = {name: value for name, value in weights.items() if name != "steering"}
    got = drafted_logits(fresh, zero, expected["tokens"], expected["features"])
    unsteered = drafted_logits(replace(config, steering=None), plain, expected["tokens"], expected["features"])
    np.testing.assert_array_equal(got, unsteered)
    np.testing.assert_allclose(unsteered, 2 * [log_softmax(expected["plain_logits"][8:], axis=-1)], atol=1e-4)


@pytest.mark.slow
def test_steering_lies_in_a_folder_of_its_own_too(tmp_path, capsys):
    """Beside a small model, or named by --steering; that of other models is refused before weights are read."""
    for name, size in (("big", RANDOM_MODEL), ("small", replace(RANDOM_MODEL, num_layers=2))):
        drawn = parameters.initialize(verifier.specs(size), jax.random.key(0))
        model_files.save_verifier(tmp_path / name, size, drawn, jnp.float32)
    config = steering.SteeringConfig(taps=(0, 1, 2), width=32, num_layers=2, ffn=64, rank=2)
    drawn = parameters.initialize(steering.specs(config), jax.random.key(1))
    (tmp_path / "steers").mkdir()
    language_model_folder.save_steering(tmp_path / "steers", config, drawn, jnp.float32)
    pair = {"verifier": tmp_path / "big", "drafter": tmp_path / "small", "dtype": "float32"}
    model = tf.load(**pair, steering=tmp_path / "steers")
    assert model.drafter.steering == config and model.drafter.taps == (0, 1, 2)
    jax.tree.map(np.testing.assert_array_equal, model.weights.drafter["steering"], drawn)
    expected = model.generate([[1, 2, 3]], max_new_tokens=6, builder="none")[0].ids
    words = ["--verifier", str(pair["verifier"]), "--drafter", str(pair["drafter"]), "--dtype", "float32", "--nodes", "3"]
    words += ["--steering", str(tmp_path / "steers"), "--prompt-ids", "1 2 3", "--max-new-tokens", "6", "--json"]
    assert main(["generate", *words]) == 0
    assert json.loads(capsys.readouterr().out)["ids"] == expected

    for change, says in (
        ({"width": 31}, "another pair"), ({"num_layers": 3}, "another pair"), ({"taps": [0, 1, 3]}, "0 to 2"),
        ({"rank": -1}, "rank"), ({"taps": [0, 1]}, "three layers"),
    ):  # fmt: skip
        (tmp_path / "steers" / "steering_config.json").write_text(json.dumps(asdict(config) | change))
        refused(lambda: tf.load(**pair, steering=tmp_path / "steers"), says)
    refused(lambda: tf.load(**pair, steering=tmp_path / "small"), "no steering_config.json")
    (tmp_path / "steers" / "steering_config.json").write_text(json.dumps(asdict(config)))
    for drafter, words in (("ngram", "drafter of kind 'ngram'"), ("none", "no drafter")):
        refused(partial(tf.load, **pair | {"drafter": drafter}, steering=tmp_path / "steers"), words)
    (tmp_path / "small" / "steering_config.json").mkdir()
    refused(lambda: tf.load(**pair), "expected a JSON file")


def test_two_factors_are_their_product_and_layers_are_slices_of_all(float64):
    config = steering.SteeringConfig(taps=(0, 1, 2), width=6, num_layers=2, ffn=5, rank=3)
    factors = random_weights(steering.specs(config), 3, 0.5, jnp.float64)
    whole = {name: x for name, x in factors.items() if name not in ("down", "up")}
    whole["project"] = jnp.einsum("dr,ryf->dyf", factors["down"], factors["up"])
    normed_bd = jax.random.normal(jax.random.key(4), (3, 6), jnp.float64)
    expected = steering.shifts(whole, normed_bd)
    np.testing.assert_allclose(steering.shifts(factors, normed_bd), expected, atol=1e-12)
    for of_layer in (steering.layer_shifts(form, normed_bd[:, None]) for form in (factors, whole)):
        np.testing.assert_allclose(jnp.stack([of_layer(i)[:, 0] for i in range(2)], axis=1), expected, atol=1e-12)
