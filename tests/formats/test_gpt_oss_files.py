"""Files of gpt-oss: MXFP4 tensors against the format, dense ones against those, and what is refused in one line."""

import json
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DATA, needs_8_devices
from model_files import assert_same, change_tensors
from published_configs import parse, without
from refusals import refused
from safetensors.numpy import load_file

import treeflash_jax as tf
from treeflash_jax.formats import model_files
from treeflash_jax.formats.architectures.gpt_oss import EverySecond
from treeflash_jax.formats.grouped_tensors import map_parts
from treeflash_jax.formats.quant_methods import METHODS

FOLDER = DATA / "hybrid" / "gpt_oss"
RAW = json.loads((FOLDER / "config.json").read_text())
EXPERTS = "model.layers.0.mlp.experts"


class OnDisk(np.ndarray):
    """An array with what tensors of safetensors files have."""

    def get_shape(self):
        return self.shape

    def get_dtype(self):
        return "U8"


def expanded(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Value by value: a sign bit, two of exponent (bias 1) and one of mantissa, of the low half of each byte first."""

    def value(code: int) -> float:
        exponent, half = code >> 1 & 3, code & 1
        size = half * 0.5 if exponent == 0 else (1 + half / 2) * 2.0 ** (exponent - 1)
        return -size if code & 8 else size

    out = np.zeros((*scales.shape, 32))
    for at in np.ndindex(*blocks.shape):
        *group, i = at
        for n, code in enumerate((int(blocks[at]) & 15, int(blocks[at]) >> 4)):
            out[*group, 2 * i + n] = value(code) * 2.0 ** (int(scales[*group]) - 127)
    return out.reshape(*scales.shape[:2], -1)


def test_every_value_of_the_format():
    """All 256 bytes, scales from the smallest exponents to the largest, and slices as they are read."""
    rng = np.random.default_rng(0)
    blocks = rng.permutation(np.tile(np.arange(256, dtype=np.uint8), 2)).reshape(2, 4, 4, 16)
    scales = rng.integers(100, 150, (2, 4, 4)).astype(np.uint8)
    scales[0, 0] = 0, 1, 127, 250
    expected = expanded(blocks, scales)
    tensor = METHODS["mxfp4"].join({}, {"x_blocks": blocks.view(OnDisk), "x_scales": scales.view(OnDisk)})["x_blocks"]
    assert tensor.get_shape() == (2, 4, 128)
    index = slice(0, 2), slice(0, 4), slice(0, 128)
    np.testing.assert_array_equal(tensor[index], expected)
    np.testing.assert_array_equal(tensor[index].astype(jnp.bfloat16), expected)
    odd = map_parts(partial(EverySecond, start=1, axis=1), tensor)
    assert odd.get_shape() == (2, 2, 128)
    np.testing.assert_array_equal(odd[1:2, 1:2, 3:70], expected[1:2, 3:4, 3:70])


def dense_tensors(tensors: dict) -> dict:
    """The same weights as one dense tensor [x, inputs, outputs] each."""
    kept = {name: x for name, x in tensors.items() if not name.endswith(("_blocks", "_scales"))}
    for name in tensors.keys() - kept.keys():
        stem = name.removesuffix("_blocks")
        if stem != name:
            kept[stem] = np.ascontiguousarray(expanded(tensors[name], tensors[f"{stem}_scales"]).swapaxes(1, 2), np.float32)
    return kept


def test_dense_files_hold_the_same_weights(tmp_path, caplog):
    folder = tmp_path / "dense"
    shutil.copytree(FOLDER, folder)
    change_tensors(folder, dense_tensors)
    (folder / "config.json").write_text(json.dumps(without(RAW, "quantization_config")))
    assert_same(model_files.load_verifier(folder), model_files.load_verifier(FOLDER))
    assert not caplog.messages
    layer = model_files.load_verifier(folder, dtype=jnp.bfloat16)[1]["groups"][0][0]
    joined = load_file(folder / "model.safetensors")[f"{EXPERTS}.gate_up_proj"]
    np.testing.assert_array_equal(layer["expert_gate"], joined[:, :, ::2])
    np.testing.assert_array_equal(layer["expert_up"], joined[:, :, 1::2])


def test_int8_rounds_values_of_four_bits_again(caplog):
    layer = model_files.load_verifier(FOLDER, quantize="int8")[1]["groups"][0][0]
    assert "holds quantised weights; quantize='int8' rounds them again" in caplog.text
    assert layer["expert_down"].values.dtype == jnp.int8 and layer["expert_down_bias"].dtype == jnp.float32


@needs_8_devices
def test_a_mesh_reads_the_same_weights():
    whole, parts = (model_files.load_verifier(FOLDER, mesh=mesh)[1] for mesh in (None, tf.make_mesh(2, 2, experts=2)))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(parts), jax.device_get(whole))
    layer = parts["groups"][0][0]
    assert layer["expert_up"].addressable_shards[0].data.shape == (3, 64, 32)
    assert layer["expert_up_bias"].addressable_shards[0].data.shape == (3, 32)


def test_keys_and_defaults_of_published_files(caplog):
    config = parse("verifier", RAW)
    assert (config.expert_size, config.window, config.swiglu_limit, config.rope.truncate) == (64, 12, 7.0, False)
    published = {"experts_per_token": 2, "initial_context_length": 64, "router_aux_loss_coef": 0.9}
    assert parse("verifier", RAW | published) == config
    assert parse("verifier", without(RAW, "layer_types", "swiglu_alpha", "swiglu_limit", "attention_bias")) == config
    assert not caplog.messages
    plain = parse("verifier", without(RAW, "head_dim", "sliding_window", "num_local_experts", "num_experts_per_tok"))
    assert (plain.head_dim, plain.window, plain.num_experts, plain.experts_per_token) == (64, 128, 128, 4)


@pytest.mark.parametrize("raw, words", [
    (RAW | {"quantization_config": {"quant_method": "gptq"}}, ("quant_method", "gptq", "mxfp4")),
    (RAW | {"layer_types": ["linear_attention"] * 4}, ("layer_types", "linear_attention", "sliding_attention")),
    (RAW | {"sliding_window": 0}, ("sliding_window", "0")),
    (RAW | {"swiglu_alpha": 1.0}, ("swiglu_alpha", "1.0")),
    (RAW | {"attention_bias": False}, ("attention_bias",)),
    (RAW | {"num_experts_per_tok": 7}, ("num_experts_per_tok 7", "at most 6")),
])  # fmt: skip
def test_refused_configs(raw, words):
    refused(lambda: parse("verifier", raw), *words)


def test_missing_and_cut_tensors_and_exponents_of_no_number(tmp_path):
    folder, name = tmp_path / "model", f"{EXPERTS}.down_proj_scales"
    shutil.copytree(FOLDER, folder)
    change_tensors(folder, lambda tensors: tensors | {name: tensors[name][:, :-1].copy()})
    refused(lambda: model_files.load_verifier(folder), f"tensor {name} has shape [6, 63, 2]", "without its last axis")
    change_tensors(folder, lambda tensors: without(tensors, name))
    refused(lambda: model_files.load_verifier(folder), f"{EXPERTS}.down_proj_blocks has shape", "expected")
    change_tensors(folder, lambda tensors: tensors | {name: np.full((6, 64, 2), 255, np.uint8)})
    refused(lambda: model_files.load_verifier(folder), f"{EXPERTS}.down_proj_blocks holds NaN or infinity")
    change_tensors(folder, lambda tensors: without(tensors, f"{EXPERTS}.gate_up_proj_blocks", name))
    refused(lambda: model_files.load_verifier(folder), f"{EXPERTS}.gate_up_proj_scales", "gate_up_proj_blocks")


@pytest.mark.parametrize("part", ["blocks", "scales"])
@pytest.mark.parametrize("dtype, name", [(np.float32, "F32"), (np.int8, "I8")])
def test_mxfp4_in_other_types_than_bytes(tmp_path, part, dtype, name):
    """Regression: floats were an IndexError, and signed bytes other values."""
    folder, tensor = tmp_path / "model", f"{EXPERTS}.down_proj_{part}"
    shutil.copytree(FOLDER, folder)
    change_tensors(folder, lambda tensors: tensors | {tensor: tensors[tensor].astype(dtype)})
    refused(lambda: model_files.load_verifier(folder), f"tensor {tensor} has type {name}, expected U8")


def test_the_family_is_only_read(tmp_path):
    config, params = model_files.load_verifier(FOLDER)
    refused(lambda: model_files.save_verifier(tmp_path / "x", config, params), "gpt_oss", "only read")
