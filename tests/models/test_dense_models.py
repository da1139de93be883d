"""A Llama with llama3 scaling and a Qwen2 with YaRN against logits of transformers (float32, random weights)."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import read_texts
from conftest import DATA, needs_8_devices

import treeflash_jax as tf
from treeflash_jax.drafters.block.block_config import fresh_layers
from treeflash_jax.formats import models
from treeflash_jax.models import quantized
from treeflash_jax.models.config import Rope

FOLDER = DATA / "qwen2"


@pytest.fixture(scope="module")
def model():
    return models.load_verifier(FOLDER)


def outputs(config, params, folder=FOLDER) -> tuple[jax.Array, jax.Array]:
    """Logits, and features after the first layer, of the stored prompt."""
    tokens = jnp.asarray(np.load(folder / "expected.npz")["prompt"])
    out, logits = read_texts(params, config, tokens, taps=(0,))
    return logits, out.features_btj


@pytest.mark.parametrize(("name", "rope"), [("llama", "llama3"), ("qwen2", "yarn")])
def test_logits_and_features_are_those_of_transformers(name, rope):
    config, params = models.load_verifier(DATA / name)
    assert config.rope.kind == rope and not config.qk_norm and config.qkv_bias == (name == "qwen2")
    expected = np.load(DATA / name / "expected.npz")
    logits, features = outputs(config, params, DATA / name)  # well past the 32 positions of the original context
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-4)
    np.testing.assert_allclose(features, expected["after_first_layer"], atol=1e-4)
    assert name == "qwen2" or models.stop_ids(DATA / name, config) == (3, 4)


@needs_8_devices
def test_a_mesh_computes_as_one_device(model):
    config, params = model
    placed = models.load_verifier(FOLDER, mesh=tf.make_mesh(2, 4))[1]
    assert placed["groups"][0][0]["q_bias"].addressable_shards[0].data.shape == (1, 8)
    with jax.set_mesh(tf.make_mesh(2, 4)):
        np.testing.assert_allclose(outputs(config, placed)[0], outputs(config, params)[0], atol=1e-5)


def test_biases_stay_wide_in_int8():
    layer = models.load_verifier(FOLDER, quantize="int8")[1]["groups"][0][0]
    assert isinstance(layer["q"], quantized.Quantized) and layer["q_bias"].dtype == jnp.float32


def test_a_new_drafter_has_the_published_kind_of_layers(model):
    """Those of PyTorch's drafters, whatever the verifier's are, and a rotation of its own."""
    config, _ = model
    layers = fresh_layers(config, 1)
    assert layers.qk_norm and not layers.qkv_bias and layers.model_type == "qwen3"
    assert layers.rope == Rope(theta=config.rope.theta) and (layers.num_layers, layers.head_dim) == (1, 8)
    for other in (replace(config, model_type="llama", qkv_bias=False, rope=Rope()), replace(layers, num_layers=3)):
        assert fresh_layers(other, 2) == replace(other, num_layers=2)
