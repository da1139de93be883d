"""Files of Qwen3.5 and Qwen3-Next: nested and text-only configs, what is not read, and what is refused in one line."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DATA, needs_8_devices
from gguf_files import write_small
from model_files import assert_same, change_tensors
from published_configs import parse, without
from refusals import refused
from safetensors.numpy import load_file

import treeflash_jax as tf
from train import from_scratch
from train.runtime import run_config
from treeflash_jax.engine.settings.pairs import locate
from treeflash_jax.formats import model_files
from treeflash_jax.models.config import DeltaSizes

FOLDER = DATA / "hybrid"
FROM_SCRATCH = Path(__file__).parents[2] / "configs" / "shipped" / "from_scratch.toml"
SIZES = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": 2}
RAW = {name: json.loads((FOLDER / name / "config.json").read_text()) for name in ("qwen3_5", "qwen3_5_text", "qwen3_next")}
TEXT, NEXT = RAW["qwen3_5_text"], RAW["qwen3_next"]


def nested(**changes) -> dict:
    return RAW["qwen3_5"] | {"text_config": RAW["qwen3_5"]["text_config"] | changes}


def test_a_nested_config_is_that_of_its_text_model():
    text, whole = parse("verifier", TEXT), parse("verifier", RAW["qwen3_5"])
    assert text.tie_embeddings and not whole.tie_embeddings, "the key at the top counts"
    assert whole == parse("verifier", TEXT | {"tie_word_embeddings": False})
    assert parse("verifier", RAW["qwen3_5"] | {"tie_word_embeddings": True}) == text
    assert text.delta == DeltaSizes(key_heads=2, value_heads=4, key_dim=8, value_dim=8, conv_width=4)
    assert text.gates_attention and text.offset_norms and text.rope.fraction == 0.25 and text.rope.theta == 1e7


def test_defaults_and_keys_of_published_files(caplog):
    sizes = [key for key in TEXT if key.startswith("linear_")]
    plain = parse("verifier", without(TEXT, "layer_types", "head_dim", *sizes))
    assert plain.layer_types == parse("verifier", TEXT).layer_types, "full attention in every fourth layer"
    assert plain.head_dim == 256
    assert plain.delta == DeltaSizes(key_heads=16, value_heads=32, key_dim=128, value_dim=128, conv_width=4)
    every_second = parse("verifier", without(TEXT, "layer_types") | {"full_attention_interval": 2})
    assert every_second.layer_types == ("linear_attention", "full_attention") * 4
    published = {
        "attn_output_gate": True, "output_gate_type": "swish", "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False, "partial_rotary_factor": 0.25,
    }  # fmt: skip
    assert parse("verifier", TEXT | published) == parse("verifier", TEXT)
    assert not caplog.messages
    experts = parse("verifier", without(NEXT, "num_experts", "norm_topk_prob"))
    assert experts.num_experts == 512 and experts.normalize_experts and experts.shared_expert_size == 20


@pytest.mark.parametrize("raw, words", [
    (TEXT | {"layer_types": ["linear_attention"] * 7 + ["sliding_attention"]}, ("layer_types", "sliding_attention")),
    (TEXT | {"linear_num_value_heads": 5}, ("linear_num_value_heads 5", "a multiple of 2 key heads")),
    (TEXT | {"num_key_value_heads": 3}, ("num_attention_heads 4", "a multiple of 3 key/value heads")),
    (TEXT | {"layer_types": ["linear_attention"] * 7}, ("layer_types", "one for each of 8 layers")),
    (TEXT | {"linear_key_head_dim": 0}, ("linear_key_head_dim", "0")),
    (TEXT | {"linear_conv_kernel_dim": 1}, ("linear_conv_kernel_dim 1",)),
    (TEXT | {"attn_output_gate": False}, ("attn_output_gate",)),
    (TEXT | {"output_gate_type": "sigmoid"}, ("output_gate_type", "sigmoid")),
    (TEXT | {"mamba_ssm_dtype": "bfloat16"}, ("mamba_ssm_dtype", "bfloat16")),
    (TEXT | {"mtp_num_hidden_layers": 2}, ("mtp_num_hidden_layers", "2")),
    (TEXT | {"quantization_config": {"quant_method": "int4"}}, ("quantization_config", "'int4'")),
    (RAW["qwen3_5"] | {"quantization_config": {"quant_method": "int4"}}, ("quantization_config", "'int4'")),
    (TEXT | {"partial_rotary_factor": 0.5}, ("partial_rotary_factor 0.5", "partial_rotary_factor 0.25")),
    (nested(rope_parameters={"rope_theta": 1e7, "partial_rotary_factor": 0.3}), ("partial_rotary_factor 0.3", "16")),
    (nested(model_type="qwen3_5_moe_text"), ("model_type", "qwen3_5_moe_text", "qwen3_5_text")),
    (without(RAW["qwen3_5"], "text_config"), ("text_config",)),
    (NEXT | {"num_experts_per_tok": 7}, ("num_experts_per_tok 7", "at most 6")),
])  # fmt: skip
def test_refused_configs(raw, words):
    refused(lambda: parse("verifier", raw), *words)


def test_no_drafter_has_recurrent_layers(tmp_path):
    """A tree's lanes would need states of their own. Files read as a drafter are the layer of multi-token prediction."""
    for raw in RAW.values():
        assert parse("drafter", raw).layers.kinds == ("full_attention",)
    drafter = {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0]}, "block_size": 4, "num_target_layers": 8}
    refused(lambda: parse("drafter", TEXT | drafter), "a drafter of model_type 'qwen3_5_text'")


@pytest.mark.filterwarnings("error")
def test_parts_for_images_are_reported_once_and_not_read(caplog):
    """Regression: in a warning of Python's, with a line of our source."""
    for _ in range(2):
        model_files.load_verifier(FOLDER / "qwen3_5")
    model_files.load_verifier(FOLDER / "qwen3_5_text")
    assert caplog.messages == ["model.visual.* of a qwen3_5_text file is not read"]


@needs_8_devices
@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_next"])
def test_a_mesh_reads_the_same_weights(name):
    _, whole = model_files.load_verifier(FOLDER / name)
    _, parts = model_files.load_verifier(FOLDER / name, mesh=tf.make_mesh(2, 4))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(parts), jax.device_get(whole))
    assert parts["groups"][0][0]["delta_z"].addressable_shards[0].data.shape == (8, 48)


@pytest.mark.parametrize("name, stem", [
    ("qwen3_5_text", "conv1d"), ("qwen3_5_text", "in_proj_b"), ("qwen3_next", "in_proj_qkvz"), ("qwen3_next", "in_proj_ba"),
])  # fmt: skip
def test_missing_and_cut_tensors(tmp_path, name, stem):
    folder, tensor = tmp_path / name, f"model.layers.1.linear_attn.{stem}.weight"
    shutil.copytree(FOLDER / name, folder)
    change_tensors(folder, lambda tensors: tensors | {tensor: tensors[tensor][:-1].copy()})
    refused(lambda: model_files.load_verifier(folder), f"{folder}: tensor {tensor} has shape", "expected")
    change_tensors(folder, lambda tensors: without(tensors, tensor))
    refused(lambda: model_files.load_verifier(folder), "missing", "model.layers.1.linear_attn")


def test_dense_files_are_written_as_they_were_read(tmp_path):
    """Keys and tensors; with experts they are only read, and nothing is trained that could not be written."""
    config, params = model_files.load_verifier(FOLDER / "qwen3_5_text")
    model_files.save_verifier(tmp_path / "dense", config, params, jnp.float32)
    assert_same(model_files.load_verifier(tmp_path / "dense"), (config, params))
    kept, written = (load_file(folder / "model.safetensors") for folder in (FOLDER / "qwen3_5_text", tmp_path / "dense"))
    assert_same(written, kept)
    sparse = replace(config, model_type="qwen3_5_moe_text")
    refused(lambda: model_files.save_verifier(tmp_path / "x", sparse, params), "qwen3_5_moe_text", "only read")
    words = [f"run={tmp_path}/run", f"tokenizer={locate('tiny')}"]
    words += [f"model.{key}={value}" for key, value in SIZES.items()]
    stage = run_config.load(from_scratch.FromScratchConfig, FROM_SCRATCH, [*words, "model.model_type=qwen3_next"])
    refused(lambda: from_scratch.main(stage), "qwen3_next", "only read")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense"]


@pytest.mark.parametrize("kind", ["qwen35", "qwen35moe", "qwen3next", "gpt-oss"])
def test_gguf_files_of_these_families_are_refused_by_name(tmp_path, kind):
    path = write_small(tmp_path / "small.gguf", {"general.architecture": kind})
    refused(lambda: model_files.load_verifier(path), "general.architecture", kind)


def test_an_image_in_a_prompt_is_refused(tmp_path):
    model = tf.load("tiny")
    chat = [{"role": "user", "content": [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "What is this?"}]}]
    refused(lambda: model.generate([chat]), "'image'", "reads text only")
