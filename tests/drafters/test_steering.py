"""Steered language models: numbers of PyTorch, steering that is zero, files. Losslessness: test_every_drafter.py.

data/steering holds a Llama model of two layers, its steering, and the logits of ten tokens: four of a prompt, which nothing
steers, four under the features of the prompt's last position, and two under those of a later one.
"""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DATA
from refusals import refused
from safetensors.numpy import load_file, save_file
from scipy.special import log_softmax

from treeflash_jax.core import parameters
from treeflash_jax.drafters import Inputs, LanguageModelDrafter, NewPositions
from treeflash_jax.formats import model_files
from treeflash_jax.models.config import ModelConfig

MODEL = {
    "model_type": "llama", "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
STEERING = {"taps": [0, 1, 2], "width": 12}
SIZES = dict(vocab_size=40, intermediate_size=24, num_heads=2, num_kv_heads=1, head_dim=8)
PUBLISHED = {"mix": "guidance_embd_layer.orig", "norm": "latent_mod_prep.norm", "project": "latent_mod_prep.w_guide"}


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    return dict(np.load(DATA / "steering" / "steering.npz"))


@pytest.fixture(scope="module")
def folder(expected, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("steered")
    tensors = {name.removeprefix("tensor:"): value for name, value in expected.items() if name.startswith("tensor:")}
    for ours, published in PUBLISHED.items():
        tensors = {name.replace(f"steering.{ours}", published): value for name, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(MODEL | {"steering": STEERING}))
    return folder


@pytest.fixture(scope="module")
def stored(folder) -> tuple[LanguageModelDrafter, dict]:
    """The model and its steering, read from files."""
    return model_files.load_drafter(folder)


def extended(drafter, weights, state, *new):
    return drafter.extend(weights, None, state, NewPositions(*new))


def drafted_logits(drafter, weights, tokens_t, features_tj) -> np.ndarray:
    """Logits after the ninth token, which was read, and after the tenth, a token of a lane; of two equal sequences."""
    tokens_bt, features_btj = (jnp.stack([x, x]) for x in (tokens_t, features_tj))
    distributions = draft_twice(drafter, weights, tokens_bt, features_btj)
    return np.stack([np.take_along_axis(p, np.argsort(t), axis=-1)[:, 0] for t, p in distributions], axis=1)


@partial(jax.jit, static_argnums=0)
def draft_twice(drafter, weights, tokens_bt, features_btj) -> list[tuple[jax.Array, jax.Array]]:
    """The fifth token is read by one sequence after the other."""
    extend = partial(extended, drafter, weights)
    state = drafter.init(2, 32, features_btj.dtype)
    state = extend(state, None, tokens_bt[:, :4], jnp.asarray([4, 4]))
    for count_b in (jnp.asarray([1, 0]), jnp.asarray([0, 1])):
        state = extend(state, features_btj[:, :1] * count_b[:, None, None], tokens_bt[:, 4:5], count_b)
    padding = jnp.zeros((2, 2), tokens_bt.dtype), jnp.ones((2, 2, features_btj.shape[2]), features_btj.dtype)
    padded = (jnp.concatenate(x, axis=1) for x in ((features_btj[:, 1:], padding[1]), (tokens_bt[:, 5:9], padding[0])))
    state = extend(state, *padded, jnp.asarray([4, 4]))
    inputs = Inputs(weights, None, state, tokens_bt[:, 8], jnp.ones(2), 2, tokens_bt, jnp.asarray([9, 9]))
    expander = drafter.configured(children=40).draft(inputs)
    start = expander.start(1)
    below = expander.follow_token(jnp.int32(0), start, tokens_bt[:, 9:10])
    return [expander.children(0, start), expander.children(1, below)]


def test_a_steered_draft_is_that_of_pytorch(stored, expected):
    """Positions keep the shifts that they were computed with, and features of padding have no effect."""
    drafter, weights = stored
    assert drafter.taps == (0, 1, 2)
    got = drafted_logits(drafter, weights, expected["tokens"], expected["features"])
    np.testing.assert_allclose(got, 2 * [log_softmax(expected["logits"][8:], axis=-1)], atol=1e-4)
    plain = log_softmax(expected["plain_logits"][8:], axis=-1)
    assert np.max(np.abs(got - plain)) > 0.1, "control: steering does something"


def test_zero_steering_is_no_steering_bit_for_bit(stored, expected):
    drafter, weights = stored
    zero = weights | {"steering": parameters.initialize(drafter.specs()["steering"], jax.random.key(0))}
    plain = {name: value for name, value in weights.items() if name != "steering"}
    got = drafted_logits(drafter, zero, expected["tokens"], expected["features"])
    unsteered = drafted_logits(replace(drafter, steering=None), plain, expected["tokens"], expected["features"])
    np.testing.assert_array_equal(got, unsteered)
    np.testing.assert_allclose(unsteered, 2 * [log_softmax(expected["plain_logits"][8:], axis=-1)], atol=1e-4)


def test_positions_read_in_one_call_are_those_read_one_by_one(float64, stored, expected):
    """Those before the last keep the shifts that they were drafted with: so do they if their state gives these again."""
    drafter, weights = stored[0], jax.tree.map(lambda x: x.astype(jnp.float64), stored[1])
    tokens_bt, features_btj = expected["tokens"][None], expected["features"][None].astype(np.float64)
    extend = partial(jax.jit(extended, static_argnums=0), drafter, weights)
    start = extend(drafter.init(1, 32, jnp.float64), None, tokens_bt[:, :4], jnp.asarray([4]))
    start = extend(start, features_btj[:, :1], tokens_bt[:, 4:5], jnp.asarray([1]))
    together, apart = extend(start, features_btj[:, 1:], tokens_bt[:, 5:9], jnp.asarray([4])), start
    for position, source in zip(range(5, 9), (0, 0, 0, 4), strict=True):
        features_b1j = features_btj[:, source : source + 1]
        apart = extend(apart, features_b1j, tokens_bt[:, position : position + 1], jnp.asarray([1]))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-12), together, apart)


def test_steering_is_written_as_it_was_read(stored, folder, tmp_path):
    """Tensor by tensor, by the published names."""
    drafter, weights = stored
    model_files.save_drafter(tmp_path, drafter, weights, dtype=jnp.float32)
    files = (load_file(path / "model.safetensors") for path in (tmp_path, folder))
    jax.tree.map(np.testing.assert_array_equal, *files)
    again, read = model_files.load_drafter(tmp_path)
    assert again == drafter
    jax.tree.map(np.testing.assert_array_equal, read, weights)


def test_steering_of_other_models_is_refused_in_one_line(stored, folder, tmp_path):
    drafter, _ = stored
    for change, words in (
        ({"width": 0}, "width = 0, expected a whole number"),
        ({"taps": [0, 1]}, "taps [0, 1], expected three layers"),
        ({"taps": [0, 1, -1]}, "expected three layers"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(MODEL | {"steering": STEERING | change}))
        refused(lambda: model_files.read_drafter_config(tmp_path), words)
    wide = json.dumps(MODEL | {"intermediate_size": 26, "steering": STEERING})
    shutil.copy(folder / "model.safetensors", tmp_path)
    (tmp_path / "config.json").write_text(wide)
    refused(lambda: model_files.load_drafter(tmp_path), "has shape")
    fits = ModelConfig(num_layers=3, hidden_size=12, **SIZES)
    assert drafter.fitted(fits) == drafter
    experts = replace(drafter, layers=replace(drafter.layers, num_experts=2, experts_per_token=1, expert_size=8))
    for other, verifier, words in (
        (drafter, replace(fits, hidden_size=16), "steering width is 12 in the drafter and 16 in the verifier"),
        (drafter, replace(fits, num_layers=2), "it reads verifier layers [2], but the verifier has layers 0 to 1"),
        (experts, fits, "got steering of a model of type 'llama', expected dense layers"),
    ):
        refused(partial(other.fitted, verifier), words)
