"""Weights of q, k, v and of gate, up as one array each: the same results, in the shards that a mesh divides."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import PROMPTS, TREE, random_weights, with_recurrent_layers
from conftest import FOLDERS, RANDOM_MODEL, needs_8_devices

import treeflash_jax as tf
from treeflash_jax.core import parameters
from treeflash_jax.core.devices import Device
from treeflash_jax.engine import loading
from treeflash_jax.engine.settings import defaults
from treeflash_jax.models import decoder, quantized

EXPERTS = replace(RANDOM_MODEL, model_type="qwen3_moe", num_experts=4, experts_per_token=2, expert_size=16)
KINDS = {
    "qwen3": (RANDOM_MODEL, None), "int8": (RANDOM_MODEL, "int8"), "fp8": (RANDOM_MODEL, "fp8"), "experts": (EXPERTS, None),
    "int4": (RANDOM_MODEL, "int4"),
    "qwen2": (replace(RANDOM_MODEL, model_type="qwen2", qk_norm=False, qkv_bias=True), None),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_give_the_same_hidden_states_keys_and_values(kind, float64):
    config, scheme = KINDS[kind]
    specs = decoder.specs(config)
    weights = random_weights(specs, dtype=jnp.float64)
    weights = jax.tree.map(lambda spec, x: quantized.compress(x, spec, scheme), specs, weights, is_leaf=parameters.is_spec)
    inputs = np.array([[3, 1, 4]]), np.array([[0, 1, 2]]), np.tri(3, dtype=bool)[None]

    @jax.jit
    def run(weights, *inputs):
        out = decoder.forward(weights, config, *inputs)
        return out.hidden_btd, out.new

    separate = run(weights, *inputs)
    decoder.merge(weights, config)
    expected = parameters.abstract(decoder.specs(config, scheme, is_merged=True), jnp.float64)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), weights) == jax.tree.map(lambda x: (x.shape, x.dtype), expected)
    jax.tree.map(lambda got, x: np.testing.assert_allclose(got, x, atol=1e-12), run(weights, *inputs), separate)


@pytest.mark.slow
@needs_8_devices
def test_a_device_that_merges_loads_merged_shards_and_answers_alike(trained, monkeypatch):
    monkeypatch.setattr(loading, "merges_weights", lambda *_: True)
    model = tf.load(**FOLDERS, mesh=tf.make_mesh(4, 2))
    layer = model.weights.verifier["groups"][0][0]
    assert {"q", "k", "v", "gate", "up"}.isdisjoint(layer)
    assert layer["qkv"].sharding.spec[0] == "model" and layer["gate_up"].sharding.spec[1] == "model"
    merged, separate = (pair.generate(PROMPTS, **TREE, max_new_tokens=16) for pair in (model, trained))
    assert [result.ids for result in merged] == [result.ids for result in separate]


def test_accelerators_merge_unless_a_mesh_divides_query_heads_alone():
    """Attention and feed-forward parts; recurrent layers are merged on every mesh."""
    devices = Device("gpu", "NVIDIA H200"), Device("tpu"), Device("cpu")
    assert [defaults.merges_weights(device) for device in devices] == [True, True, False]
    mesh = jax.sharding.AbstractMesh((1, 4), ("data", "model"))
    for kv_heads, is_merged in ((8, True), (2, False)):
        config = with_recurrent_layers(replace(RANDOM_MODEL, num_heads=8, num_kv_heads=kv_heads, num_layers=2))
        (recurrent,), (attention,) = decoder.specs(config, is_merged=True, mesh=mesh)["groups"]
        assert "delta_in" in recurrent and ("qkv" in attention) == is_merged
        assert [("gate_up" in layer) for layer in (recurrent, attention)] == [is_merged] * 2
