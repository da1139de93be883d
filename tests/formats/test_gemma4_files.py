"""Files of Gemma 4: both spellings of sizes, nested and flat configs, what is not read, and what is refused in one line."""

import json
import shutil
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from answers import random_weights
from conftest import DATA, RANDOM_DRAFTER, needs_8_devices
from gguf_files import write_small
from model_files import assert_same, change_tensors
from published_configs import parse, without
from refusals import refused

import treeflash_jax as tf
from treeflash_jax.formats import dialects, model_files
from treeflash_jax.models.config import KindSizes, ModelConfig, Rope
from treeflash_jax.models.quantized_weight import Quantized

FOLDER = DATA / "hybrid"
RAW = {name: json.loads((FOLDER / name / "config.json").read_text()) for name in ("gemma4", "gemma4_moe", "gemma4_edge")}
TEXT, MOE, EDGE = (RAW[name]["text_config"] for name in RAW)
SIZES = {"global_head_dim": 32, "num_global_key_value_heads": 1}
SHARED = "model.language_model.layers.4.self_attn.k_proj.weight"


def nested(**changes) -> dict:
    return RAW["gemma4"] | {"text_config": TEXT | changes}


def test_sizes_in_both_spellings_are_the_same():
    config = parse("verifier", RAW["gemma4"])
    assert parse("verifier", RAW["gemma4"] | {"text_config": without(TEXT, "per_layer_config") | SIZES}) == config
    window = Rope(theta=1e4, attention_factor=2.0)
    full = Rope(theta=1e6, kind="proportional", fraction=0.25, attention_factor=32**0.25)
    assert dict(config.sizes) == {
        "sliding_attention": KindSizes(num_kv_heads=2, head_dim=16, rope=window, intermediate_size=80),
        "full_attention": KindSizes(num_kv_heads=1, head_dim=32, rope=full, intermediate_size=80, keys_are_values=True),
    }
    assert (config.window, config.logit_cap, config.embedding_factor) == (12, 30.0, 48**0.5) and config.tie_embeddings


def test_edge_models_share_keys_and_values_and_have_wide_layers_there():
    config = parse("verifier", RAW["gemma4_edge"])
    assert config.kinds[4:] == ("shared_sliding_attention", "shared_full_attention") * 2
    assert [config.of_kind(kind).intermediate_size for kind in config.kinds] == [80] * 4 + [160] * 4
    assert config.layer_input_size == 8 and not config.of_kind("full_attention").keys_are_values


def test_flat_and_unified_configs_are_those_of_the_same_text_model():
    config = parse("verifier", RAW["gemma4"])
    assert parse("verifier", TEXT) == config
    unified = without(TEXT, "hidden_size_per_layer_input", "vocab_size_per_layer_input") | {
        "model_type": "gemma4_unified_text"
    }
    flat = parse("verifier", unified)
    assert flat.model_type == "gemma4_unified_text" and flat.sizes == config.sizes and flat.layer_input_size == 0
    assert parse("verifier", RAW["gemma4"] | {"model_type": "gemma4_unified", "text_config": unified}) == flat


def test_keys_of_published_files(caplog):
    published = {
        "audio_config": None, "boi_token_id": 255999, "eoi_token_id": 258882, "boa_token_id": 256000,
        "eoa_token_index": 258883, "video_token_id": 258884, "audio_token_id": 258881,
        "vision_soft_tokens_per_image": 280, "dtype": "bfloat16",
        "initializer_range": 0.02, "transformers_version": "5.5.0",
    }  # fmt: skip
    assert parse("verifier", RAW["gemma4"] | published) == parse("verifier", RAW["gemma4"])
    assert not caplog.messages
    moe = parse("verifier", RAW["gemma4_moe"])
    assert (moe.num_experts, moe.experts_per_token, moe.expert_size) == (6, 2, 24) and moe.dense_beside_experts


@pytest.mark.parametrize("raw, words", [
    (nested(use_bidirectional_attention="all"), ("use_bidirectional_attention", "all")),
    (nested(hidden_activation="silu"), ("hidden_activation", "silu")),
    (nested(attention_bias=True), ("attention_bias",)),
    (nested(layer_types=["full_attention"] + ["sliding_attention"] * 5), ("last of layer_types", "full_attention")),
    (nested(num_kv_shared_layers=4), ("num_kv_shared_layers 4", "a layer of each kind before these")),
    (nested(num_kv_shared_layers=6), ("num_kv_shared_layers", "6")),
    (nested(per_layer_config={"2": {"head_dim": 32}}), ("sizes of full_attention layers", "those of all layers")),
    (nested(per_layer_config=TEXT["per_layer_config"] | {"0": {"head_dim": 8}}), ("sizes of sliding_attention layers",)),
    (nested(per_layer_config={"2": {"head_dim": 33}, "5": {"head_dim": 33}}), ("head_dim 33", "an even number")),
    (nested(per_layer_config={str(i): {"num_key_value_heads": 3} for i in (2, 5)}), ("a multiple of 3 key/value heads",)),
    (nested(hidden_size_per_layer_input=8, vocab_size_per_layer_input=99), ("vocab_size_per_layer_input 99", "320")),
    (nested(rope_parameters={"full_attention": {"rope_type": "proportional", "factor": 2.0}}), ("sliding_attention",)),
    (nested(rope_parameters=TEXT["rope_parameters"] | {
        "full_attention": {"rope_type": "proportional", "factor": 2.0}
    }), ("factor",)),
    (RAW["gemma4_moe"] | {"text_config": MOE | {"top_k_experts": 7}}, ("top_k_experts 7", "at most 6")),
    (nested(rope_theta=1e4), ("rope_theta", "10000.0")),
    (nested(attn_logit_softcapping=50.0), ("attn_logit_softcapping",)),
    (nested(model_type="gemma3_text"), ("model_type", "gemma3_text", "gemma4_text")),
    (without(RAW["gemma4"], "text_config"), ("text_config",)),
    ({"model_type": "muse_glimmer"}, ("model_type 'muse_glimmer'", "gemma4")),
    ({"model_type": "gemma3"}, ("model_type 'gemma3'",)), ({"model_type": "glm4"}, ("model_type 'glm4'",)),
    ({"model_type": "gemma4_assistant"}, ("model_type 'gemma4_assistant'",)),
])  # fmt: skip
def test_refused_configs(raw, words):
    refused(lambda: parse("verifier", raw), *words)


def test_block_drafters_for_gemma(tmp_path):
    """They embed with the verifier's factor, and have the cap that their files state, in either place."""
    qwen = json.loads((DATA / "conformance" / "c_dflash" / "drafter" / "config.json").read_text())
    outside = parse("drafter", qwen | {"final_logit_softcapping": 30.0})
    inside = parse("drafter", qwen | {"dflash_config": qwen["dflash_config"] | {"final_logit_softcapping": 30.0}})
    assert outside.logit_cap == 30.0 and inside == outside == parse("drafter", dialects.DIALECTS["dflash"].to_hf(outside))
    refused(lambda: parse("drafter", qwen | {"final_logit_softcapping": -1.0}), "final_logit_softcapping", "above 0")
    sizes = {"hidden_size": outside.layers.hidden_size, "vocab_size": outside.layers.vocab_size}
    gemma = replace(parse("verifier", RAW["gemma4"]), **sizes, num_layers=outside.num_target_layers)
    assert outside.fitted(gemma).embedding_factor == gemma.embedding_factor > 1
    config = {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0]}, "block_size": 4, "num_target_layers": 6}
    same_sizes = without(TEXT, "layer_types", "per_layer_config") | SIZES
    refused(lambda: parse("drafter", same_sizes | config), "a drafter of model_type 'gemma4_text'")


@pytest.mark.filterwarnings("error")
def test_parts_for_images_are_reported_once_and_not_read(caplog):
    for _ in range(2):
        model_files.load_verifier(FOLDER / "gemma4")
    assert caplog.messages == ["model.vision_tower.* of a gemma4_text file is not read"]


def test_text_only_files_hold_the_same_weights(tmp_path, caplog):
    folder = tmp_path / "text"
    shutil.copytree(FOLDER / "gemma4_edge", folder)
    (folder / "config.json").write_text(json.dumps(EDGE))

    def text_only(tensors: dict) -> dict:
        named = {name.replace("language_model.", ""): x for name, x in tensors.items() if "vision" not in name}
        return without(named, *(name for name in named if ".layers.5.self_attn.k_" in name))  # which nothing reads

    change_tensors(folder, text_only)
    whole = model_files.load_verifier(FOLDER / "gemma4_edge")
    caplog.clear()
    assert_same(model_files.load_verifier(folder), whole)
    assert not caplog.messages
    assert "k" not in whole[1]["groups"][4][0]


def test_missing_and_cut_tensors(tmp_path):
    folder, name = tmp_path / "model", "model.language_model.layers.1.layer_scalar"
    shutil.copytree(FOLDER / "gemma4", folder)
    change_tensors(folder, lambda tensors: tensors | {name: np.ones(2, np.float32)})
    refused(lambda: model_files.load_verifier(folder), "model.layers.1.layer_scalar has shape [2]", "expected [1]")
    change_tensors(folder, lambda tensors: without(tensors, name))
    refused(lambda: model_files.load_verifier(folder), "tensors missing: 1", "model.layers.1.layer_scalar")
    change_tensors(folder, lambda tensors: tensors | {name: np.ones(1, np.float32), "model.other.x": np.ones(1)})
    refused(lambda: model_files.load_verifier(folder), "unknown tensors: 1", "model.other.x")


@needs_8_devices
@pytest.mark.parametrize("name", RAW)
def test_a_mesh_reads_the_same_weights(name):
    _, whole = model_files.load_verifier(FOLDER / name)
    _, parts = model_files.load_verifier(FOLDER / name, mesh=tf.make_mesh(2, 4))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(parts), jax.device_get(whole))
    if name == "gemma4_edge":  # each device has a part of the rows
        assert parts["input_embed"].addressable_shards[0].data.shape == (80, 64)


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_the_table_of_each_layers_inputs_keeps_its_dtype(scheme):
    _, params = model_files.load_verifier(FOLDER / "gemma4_edge", quantize=scheme)
    assert params["input_embed"].dtype == np.float32 and isinstance(params["input_map"], Quantized)
    layer = params["groups"][0][0]
    wide = {name for name, x in layer.items() if not isinstance(x, Quantized)}
    assert wide == {name for name in layer if "norm" in name} | {"scalar"}


@pytest.mark.parametrize("kind", ["gemma3", "gemma3n"])
def test_gguf_files_of_other_gemmas_are_refused_by_name(tmp_path, kind):
    path = write_small(tmp_path / "small.gguf", {"general.architecture": kind})
    refused(lambda: model_files.load_verifier(path), "general.architecture", kind)


def test_the_family_is_only_read(tmp_path):
    config, params = model_files.load_verifier(FOLDER / "gemma4")
    refused(lambda: model_files.save_verifier(tmp_path / "x", config, params), "gemma4_text", "only read")


def gemma_for(drafter) -> ModelConfig:
    """The verifier with the sizes that a drafter expects."""
    width = getattr(drafter, "target_hidden_size", drafter.layers.hidden_size)
    sizes = {"hidden_size": width, "vocab_size": drafter.layers.vocab_size, "num_layers": 6}
    return replace(parse("verifier", RAW["gemma4"]), **sizes, embedding_factor=width**0.5)


FOR_GEMMA = {"verifier": ("google/gemma-4-31B-it", "Gemma4ForConditionalGeneration")}


def test_block_drafters_of_the_speculators_library_embed_without_a_factor():
    """As it trains them. A drafter with the factor cannot be written in this form."""
    drafter = parse("drafter", json.loads((DATA / "published" / "dspark_speculators" / "config.json").read_text()))
    fitted = replace(drafter, taps=(0,), num_target_layers=None).fitted(gemma_for(drafter))
    assert fitted.embedding_factor == 1
    for fields in ({"embedding_factor": 3.0}, {"logit_cap": 30.0}, FOR_GEMMA):
        trained = replace(RANDOM_DRAFTER, head="lowrank", shifted=True, **fields)
        write = partial(dialects.DIALECTS["speculators-dspark"].to_hf, trained)
        refused(write, "trained with the verifier's embedding factor", "another dialect")


@pytest.mark.parametrize("dialect", ["dflash", "treeflash"])
def test_drafters_without_a_factor_are_converted_unless_they_are_for_gemma(dialect, tmp_path):
    drafter = replace(RANDOM_DRAFTER, head="marginal", scales_embeddings=False)
    params = random_weights(drafter.specs())
    for name, fields in (("theirs", {}), ("for gemma", FOR_GEMMA)):
        model_files.save_drafter(tmp_path / name, replace(drafter, **fields), params, dialect="speculators-dflash")
    model_files.convert_drafter(tmp_path / "theirs", tmp_path / "ours", dialect)
    convert = partial(model_files.convert_drafter, tmp_path / "for gemma", tmp_path / "x", dialect)
    refused(convert, "trained without the verifier's embedding factor", "another dialect")


@pytest.mark.parametrize("form", ["speculators", "eagle"])
def test_eagle3_drafters_of_llamas_layers_are_read_for_gemma(form):
    drafter = model_files.read_drafter_config(DATA / "eagle3" / form)
    assert replace(drafter, taps=(0, 1, 2)).fitted(gemma_for(drafter)).taps == (0, 1, 2)


def test_drafters_of_gemmas_layers_are_refused():
    """DeepSpec's for Gemma 4: EAGLE-3 and DSpark."""
    layer = (
        without(TEXT, "layer_types", "per_layer_config") | SIZES | {"num_hidden_layers": 1, "target_layer_ids": [1, 2, 4]}
    )
    refused(lambda: parse("drafter", layer | {"ttt_length": 7}), "model_type 'gemma4_text'", "'llama' or 'qwen3'")
    block = {"block_size": 7, "mask_token_id": 1, "markov_rank": 8, "markov_head_type": "vanilla", "num_target_layers": 6}
    refused(lambda: parse("drafter", layer | block), "gemma4_text")
