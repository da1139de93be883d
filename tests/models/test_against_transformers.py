"""Verifiers against logits that transformers computed in float32 for random weights.

A Llama with llama3 scaling, a Qwen2 with YaRN, and a Qwen3-MoE in both layouts of its files.
"""

import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from answers import read_texts
from conftest import DATA, needs_8_devices
from model_files import assert_same
from published_configs import parse, without
from refusals import refused
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from treeflash_jax import make_mesh
from treeflash_jax.drafters.block.block_drafter import fresh_layers
from treeflash_jax.formats import model_files, storage, tensor_files
from treeflash_jax.models.config import Rope
from treeflash_jax.models.quantized_weight import Quantized

QWEN2, FOLDER = DATA / "qwen2", DATA / "qwen3_moe"
RAW = json.loads((FOLDER / "apart" / "config.json").read_text())


@pytest.mark.parametrize("name, rope, tap, after", [
    ("llama", "llama3", 0, "after_first_layer"), ("qwen2", "yarn", 0, "after_first_layer"),
    ("qwen3_moe/apart", "default", 1, "after_second_layer"),
])  # fmt: skip
def test_logits_and_features(name, rope, tap, after):
    """Texts of the scaled rotations go well past the 32 positions of the original context."""
    folder = DATA / name
    config, params = model_files.load_verifier(folder)
    assert config.rope.kind == rope and config.qk_norm == (config.num_experts > 0) and config.qkv_bias == (name == "qwen2")
    expected = np.load(DATA / name.split("/")[0] / "expected.npz")
    out, logits = read_texts(params, config, jnp.asarray(expected["prompt"]), taps=(tap,))
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-4)
    np.testing.assert_allclose(out.features_btj, expected[after], atol=1e-4)


@needs_8_devices
def test_a_mesh_computes_as_one_device():
    config, params = model_files.load_verifier(QWEN2)
    tokens, mesh = jnp.asarray(np.load(QWEN2 / "expected.npz")["prompt"]), make_mesh(2, 4)
    placed = model_files.load_verifier(QWEN2, mesh=mesh)[1]
    assert placed["groups"][0][0]["q_bias"].addressable_shards[0].data.shape == (1, 8)
    expected = read_texts(params, config, tokens)[1]
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(read_texts(placed, config, tokens)[1], expected, atol=1e-5)


def test_biases_stay_wide_in_int8():
    layer = model_files.load_verifier(QWEN2, quantize="int8")[1]["groups"][0][0]
    assert isinstance(layer["q"], Quantized) and layer["q_bias"].dtype == jnp.float32


def test_a_new_drafter_has_the_published_kind_of_layers():
    """As in PyTorch's drafters, whatever the verifier has, and a rotation of its own."""
    config = model_files.read_verifier_config(QWEN2)
    layers = fresh_layers(config, 1)
    assert layers.qk_norm and not layers.qkv_bias and layers.model_type == "qwen3"
    assert layers.rope == Rope(theta=config.rope.theta) and (layers.num_layers, layers.head_dim) == (1, 8)
    for other in (replace(config, model_type="llama", qkv_bias=False, rope=Rope()), replace(layers, num_layers=3)):
        assert fresh_layers(other, 2) == replace(other, num_layers=2)


def test_experts_of_both_layouts_are_the_same_and_written_one_by_one(tmp_path):
    config, params = model_files.load_verifier(FOLDER / "fused")
    assert [run[1:] for run in config.runs] == [(True, 2), (False, 1), (True, 1)] and config.normalize_experts
    assert_same(model_files.load_verifier(FOLDER / "apart"), (config, params))
    model_files.save_verifier(tmp_path, config, params, jnp.float32)
    assert model_files.read_verifier_config(tmp_path) == config
    written, published = load_file(tmp_path / "model.safetensors"), load_file(FOLDER / "apart" / "model.safetensors")
    assert written.keys() == published.keys()
    for name, tensor in written.items():
        np.testing.assert_array_equal(tensor, published[name], err_msg=name)


def test_which_layers_are_dense():
    raw = without(RAW, "mlp_only_layers") | {"num_hidden_layers": 6}
    for changes in ({}, {"mlp_only_layers": None}, {"mlp_only_layers": []}):
        assert parse("verifier", raw | changes).dense_layers == ()
    assert parse("verifier", raw | {"decoder_sparse_step": 2, "mlp_only_layers": [0, 3]}).dense_layers == (0, 2, 3, 4)
    parsed = parse("verifier", {**RAW, "num_experts": 4})
    assert parsed.num_experts == 4 and parsed == parse("verifier", RAW)
    plain = parse("verifier", without(RAW, "num_local_experts", "norm_topk_prob"))
    assert (plain.num_experts, plain.normalize_experts) == (128, False), "transformers' defaults"
    coder = {"shared_expert_intermediate_size": 0, "use_qk_norm": True, "qkv_bias": False}
    assert parse("verifier", RAW | coder) == parse("verifier", RAW)


@pytest.mark.parametrize("changes, words", [
    ({"num_experts_per_tok": 5}, ("num_experts_per_tok 5", "at most 4")),
    ({"num_experts": 8}, ("num_experts 8", "num_local_experts 4")),
    ({"shared_expert_intermediate_size": 64}, ("shared_expert_intermediate_size", "64")),
    ({"mlp_only_layers": [1, 4]}, ("mlp_only_layers [1, 4]", "0 to 3")),
    ({"mlp_only_layers": [-1]}, ("mlp_only_layers", "-1")),
    ({"decoder_sparse_step": 0}, ("decoder_sparse_step", "0")),
    ({"use_qk_norm": False}, ("use_qk_norm",)),
    ({"qkv_bias": True}, ("qkv_bias",)),
])  # fmt: skip
def test_refused_configs(changes, words):
    refused(lambda: parse("verifier", RAW | changes), *words)


def test_a_drafter_of_experts_is_refused():
    drafter = {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0]}, "block_size": 4, "num_target_layers": 4}
    words = "config.json: got a drafter of model_type 'qwen3_moe', expected ", " experts"
    refused(lambda: parse("drafter", RAW | drafter), *words)


APART, FUSED = (load_file(FOLDER / name / "model.safetensors") for name in ("apart", "fused"))
MISSING = "model.layers.1.mlp.experts.2.up_proj.weight"
FUSED_NAME = "model.layers.0.mlp.experts.gate_up_proj"
BAD = {
    "both": (APART | FUSED, "unknown tensors: "),
    "missing": (without(APART, MISSING), f"tensors missing: 1, the first is {MISSING}"),
    "shape": (APART | {MISSING: APART[MISSING][:5]}, f"{MISSING} has shape [5, 16], expected [8, 16]"),
    "fused shape": (FUSED | {FUSED_NAME: FUSED[FUSED_NAME][:, :8]}, f"{FUSED_NAME} has shape [4, 8, 16], expected [4,"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_refused_files(tmp_path, name):
    tensors, words = BAD[name]
    shutil.copy(FOLDER / "apart" / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    refused(lambda: model_files.load_verifier(tmp_path), str(tmp_path), words)


@needs_8_devices
@pytest.mark.parametrize("layout", ["apart", "fused"])
def test_each_device_reads_its_own_experts_from_one_open_file(monkeypatch, layout):
    opened, read, read_slice = [], [], storage.read_slice

    def read_counted(source, spec, entry, *place):
        block = read_slice(source, spec, entry, *place)
        read.append((entry.name, block.nbytes))
        return block

    monkeypatch.setattr(storage, "read_slice", read_counted)
    monkeypatch.setattr(tensor_files, "safe_open", lambda path, **named: opened.append(path) or safe_open(path, **named))
    mesh = make_mesh(2, 4)
    _, whole = model_files.load_verifier(FOLDER / layout)
    opened.clear()
    read.clear()
    _, params = model_files.load_verifier(FOLDER / layout, mesh=mesh)
    assert len(opened) == 1
    weight = params["groups"][0][0]["expert_gate"]
    assert tuple(weight.sharding.spec) == ("model", None, None)
    assert {shard.data.shape for shard in weight.addressable_shards} == {(1, 16, 8)}
    blocks = [size for name, size in read if "experts" in name]
    assert max(blocks) <= 16 * 8 * 4, "of one matrix of one expert"
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(params), whole)
