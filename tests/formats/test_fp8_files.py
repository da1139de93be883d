"""FP8 files: expanded and kept weights against the dense ones that they stand for, and what is refused in one line."""

import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DATA, FOLDERS, needs_8_devices
from fp8_files import FLOAT, FP8, count_values, make_folders, read_float8, widened
from model_files import assert_same, change_json
from published_configs import QWEN3_4B, parse
from refusals import refused
from safetensors.numpy import load_file, save_file

import treeflash_jax as tf
from treeflash_jax.core import parameters
from treeflash_jax.engine import loading
from treeflash_jax.formats import model_files, storage
from treeflash_jax.formats.quant_methods import fp8
from treeflash_jax.models import decoder

SOURCE = FOLDERS["verifier"]
BLOCKS = FP8 | {"weight_block_size": [24, 40]}  # which divide no size of the model
FORMS = {
    "blocks": ((24, 40), BLOCKS, {}),
    "scales in bfloat16, some modules not converted": ((16, 32), FP8 | {"weight_block_size": [16, 32]}, {
        "scale_dtype": jnp.bfloat16, "kept": ("k_proj", "layers.1.mlp.down"),
    }),
    "channels": ((1, 0), FLOAT, {"ending": "_scale"}),
    "tensors": ((0, 0), FLOAT, {"ending": "_scale"}),
    "blocks of compressed-tensors": ((24, 40), FLOAT | {
        "config_groups": {"group_0": {"weights": {"strategy": "block", "block_structure": [24, 40]}}},
    }, {"ending": "_scale"}),
}  # fmt: skip
SOURCES = {
    "hybrid": DATA / "hybrid" / "qwen3_5",
    "experts": DATA / "qwen3_moe" / "apart",
    "fused experts": DATA / "qwen3_moe" / "fused",
}


def dense_of(weights, config):
    return jax.tree.map(lambda spec, x: widened(x, spec), decoder.specs(config), weights, is_leaf=parameters.is_spec)


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_the_dense_ones_expanded_or_kept(form, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "READ_AT_ONCE", 500)  # in pieces that end inside blocks
    block, config, how = FORMS[form]
    folder, dense = make_folders(tmp_path, SOURCE, block, config, **how)
    expected = model_files.load_verifier(dense)
    assert_same(model_files.load_verifier(folder), expected)
    narrow = partial(model_files.load_verifier, dtype=jnp.bfloat16)
    assert_same(narrow(folder), narrow(dense))
    config, kept = model_files.load_verifier(folder, quantize="fp8")
    assert_same(dense_of(kept, config), jax.device_get(expected[1]))
    assert count_values(kept) == config.num_layers * 7 - (config.num_layers + 1 if "kept" in how else 0)
    values = read_float8(folder)["model.layers.0.mlp.up_proj.weight"]
    np.testing.assert_array_equal(kept["groups"][0][0]["up"].values, values)
    assert (kept["groups"][0][0]["up"].block is None) == (block[1] == 0)
    assert narrow(folder, quantize="fp8")[1]["groups"][0][0]["up"].dtype == jnp.bfloat16


def test_a_scale_per_channel_is_not_one_per_block():
    """Regression: 32 channels of 4,096 inputs have as many scales as blocks of 128 x 128."""
    values, scales = np.ones((32, 4096), jnp.float8_e4m3fn), np.arange(1, 33, dtype=np.float32)[:, None]
    stored = [SimpleNamespace(get_shape=lambda x=x: x.shape, get_dtype=lambda kind=kind: kind)
              for x, kind in ((values, "F8_E4M3"), (scales, "F32"))]  # fmt: skip
    assert fp8._join_weight("x.weight_scale", *stored, (128, 128)).block == (1, 4096)


@pytest.mark.parametrize("name", SOURCES)
def test_hybrids_and_experts_are_kept_and_expanded(name, tmp_path):
    """The configuration of an image-and-text file is outside that of its text model; its drafter has FP8 weights, too."""
    folder, dense = make_folders(
        tmp_path, SOURCES[name], (16, 12), FP8 | {"weight_block_size": [16, 12]}, kept=("_a.", "_b.")
    )
    config, kept = model_files.load_verifier(folder, quantize="fp8")
    expected = jax.device_get(model_files.load_verifier(dense)[1])
    assert_same(model_files.load_verifier(folder)[1], expected)
    assert_same(dense_of(kept, config), expected)
    layer = kept["groups"][0][0]
    if name == "hybrid":
        assert count_values(layer) == 6 and isinstance(layer["delta_b"], jax.Array)
        assert_same(model_files.load_drafter(folder), model_files.load_drafter(dense))
    else:
        assert layer["expert_up"].block == (1, 4, 8) and isinstance(layer["router"], jax.Array)


@needs_8_devices
@pytest.mark.parametrize("quantize", [None, "fp8"])
def test_a_mesh_reads_whole_blocks_of_its_slices(quantize, tmp_path):
    folder, _ = make_folders(tmp_path, SOURCE, (64, 64), FP8 | {"weight_block_size": [64, 64]})
    whole = model_files.load_verifier(folder, quantize=quantize)
    config, parts = model_files.load_verifier(folder, quantize=quantize, mesh=tf.make_mesh(2, 4))
    assert_same(dense_of(jax.device_get(parts), config), dense_of(whole[1], config))
    if quantize:
        up, down = (parts["groups"][0][0][name] for name in ("up", "down"))
        for weight, axis in ((up, 0), (down, 1)):
            assert weight.scale.sharding.spec[axis] == weight.values.sharding.spec[axis] == "model"


def test_an_unset_scheme_expands_on_cpus_and_keeps_where_that_moves_fewer_bytes(tmp_path, monkeypatch):
    folder, dense = make_folders(tmp_path, SOURCE, (24, 40), BLOCKS)
    load = partial(tf.load, folder, drafter="none")
    assert [load(quantize=scheme).quantize for scheme in (None, "none", "fp8")] == [None, None, "fp8"]
    monkeypatch.setattr(loading, "keeps_fp8", lambda *_: True)
    assert [load(quantize=scheme).quantize for scheme in (None, "none")] == ["fp8", None]
    assert tf.load(dense, drafter="none").quantize is None, "other files are as they are"
    kept = load()
    refused(lambda: model_files.save_verifier(tmp_path / "x", kept.verifier, kept.weights.verifier), "fp8", "'none'")


def test_int8_rounds_fp8_again(tmp_path, caplog):
    folder, _ = make_folders(tmp_path, SOURCE, (24, 40), BLOCKS)
    layer = model_files.load_verifier(folder, quantize="int8")[1]["groups"][0][0]
    assert "holds quantised weights; quantize='int8' rounds them again" in caplog.text
    assert layer["up"].values.dtype == jnp.int8


def test_scales_of_activations_are_reported_once_and_not_read(tmp_path, caplog):
    extra = {f"model.layers.{i}.self_attn.k_proj.input_scale": np.ones(1, np.float32) for i in range(2)}
    folder, dense = make_folders(tmp_path, SOURCE, (24, 40), BLOCKS | {"activation_scheme": "static"}, extra=extra)
    got = model_files.load_verifier(folder)
    [warning] = caplog.messages
    assert re.search(r"such as .*input_scale, are not read: neither is quantised here", warning)
    assert_same(got, model_files.load_verifier(dense))


@pytest.mark.parametrize("config, words", [
    *(({"quant_method": name}, (repr(name), "expected fp8, ", "bfloat16 files")) for name in
      ("bitsandbytes", "int4", ["fp8"], None)),
    ({"quant_method": "mxfp4"}, ("'mxfp4'", "gpt-oss")),
    (FP8 | {"fmt": "e5m2"}, ("fmt = 'e5m2'", "expected 'e4m3'")),
    (FP8 | {"weight_block_size": [128]}, ("weight_block_size", "[128]", "two whole numbers")),
    (FP8 | {"weight_block_size": [128, 0]}, ("weight_block_size", "two whole numbers")),
    (FLOAT | {"sparsity_config": {"format": "sparse-24-bitmask"}}, ("sparsity_config",)),
    (FLOAT | {"transform_config": {"config_groups": {}}}, ("transform_config",)),
])  # fmt: skip
def test_other_methods_are_refused_by_name(config, words):
    refused(lambda: parse("verifier", QWEN3_4B | {"quantization_config": config}), "quantization_config", *words)


def test_published_configs_are_read():
    published = FP8 | {"weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
    assert parse("verifier", QWEN3_4B | {"quantization_config": published}) == parse("verifier", QWEN3_4B)
    dense = FLOAT | {"sparsity_config": {"format": "dense", "global_sparsity": 0.1}}
    assert parse("verifier", QWEN3_4B | {"quantization_config": dense}) == parse("verifier", QWEN3_4B)
    assert parse("verifier", QWEN3_4B | {"quantization_config": FLOAT}) == parse("verifier", QWEN3_4B)


UP = "model.layers.0.mlp.up_proj.weight"
SCALE = f"{UP}_scale_inv"


@pytest.mark.parametrize("quantize", [None, "fp8"])
@pytest.mark.parametrize("change, words", [
    ({SCALE: np.ones((6, 1), np.float32)}, (f"{SCALE} has shape [6, 1]", "expected [6, 2]")),
    ({SCALE: np.ones((6, 2), np.int32)}, (f"{SCALE} has shape [6, 2] of type I32",)),
    ({UP: None}, (f"got no tensor {UP} for the scales",)),
    ({UP: np.ones((128, 64), np.float32)}, (f"got type F32 {UP}", "expected a tensor of type F8_E4M3")),
    ({SCALE: None}, (f"{UP} has type F8_E4M3, expected one of",)),
    ({SCALE: np.full((6, 2), np.nan, np.float32)}, (UP, "holds NaN or infinity")),
    ({UP: np.full((128, 64), np.nan, jnp.float8_e4m3fn)}, (UP, "holds NaN or infinity")),
])  # fmt: skip
def test_damaged_files(change, words, quantize, tmp_path):
    folder, dense = make_folders(tmp_path, SOURCE, (24, 40), BLOCKS)
    tensors = load_file(dense / "model.safetensors") | {UP: read_float8(folder)[UP], SCALE: np.ones((6, 2), np.float32)}
    tensors = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
    save_file(tensors, folder / "model.safetensors")
    refused(lambda: model_files.load_verifier(folder, quantize=quantize), *words)


def test_scales_rounded_to_a_narrow_dtype_change_weights_as_little_as_rounding_those(tmp_path):
    folder, dense = make_folders(tmp_path, SOURCE, (24, 40), BLOCKS)
    values, scales = read_float8(folder)[UP], np.random.default_rng(1).uniform(0.001, 0.004, (6, 2)).astype(np.float32)
    save_file(load_file(dense / "model.safetensors") | {UP: values, SCALE: scales}, folder / "model.safetensors")
    exact = values.astype(np.float32) * scales.repeat(24, 0)[:128].repeat(40, 1)[:, :64]
    kept = model_files.load_verifier(folder, dtype=jnp.bfloat16, quantize="fp8")[1]["groups"][0][0]["up"]
    error, rounding = np.abs(widened(kept, None) - exact), jnp.finfo(jnp.bfloat16).eps / 2
    assert 0 < error.max() and (error <= float(rounding) * np.abs(exact)).all()


def test_fp8_weights_without_a_configuration_are_refused(tmp_path):
    folder, _ = make_folders(tmp_path, SOURCE, (24, 40), BLOCKS)
    change_json(folder / "config.json", quantization_config=None)
    refused(lambda: model_files.load_verifier(folder), "unknown tensors", "weight_scale_inv")
