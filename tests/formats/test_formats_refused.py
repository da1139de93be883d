"""Refusals of model files: wrong keys of config.json, layers without tensors, and weights that are not numbers."""

import json
import math
import shutil

import numpy as np
import pytest
from conftest import DATA, RANDOM_MODEL
from ml_dtypes import bfloat16
from model_files import change_json
from published_configs import LLAMA_31_8B, QWEN3_4B, QWEN25_7B_YARN, TREEFLASH_4B, parse
from refusals import refused, understood

import treeflash_jax as tf
from treeflash_jax.engine.pairs import locate
from treeflash_jax.formats import models, storage

HUGE = 10**400
SIZES = """vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    max_position_embeddings block_size num_target_layers eos_token_id""".split()


def test_keys_of_config_json():
    wrong = None, "x", "", [], {}, [[1]], {"a": 1}, 1.5, math.nan, math.inf, -1, 0, 2**31, 2**63, HUGE, True, ["x"] * 10**4
    for raw in (QWEN3_4B, LLAMA_31_8B, QWEN25_7B_YARN, TREEFLASH_4B):
        part = "drafter" if raw is TREEFLASH_4B else "verifier"
        for key in raw:
            for value in wrong:
                if understood(parse, part, {**raw, key: value}):
                    assert key not in SIZES or not (isinstance(value, int) and value >= 2**31), (key, value)
    yarn = "factor original_max_position_embeddings attention_factor mscale mscale_all_dim beta_fast beta_slow type"
    for key in [*yarn.split(), "truncate"]:
        for value in wrong:
            rope = QWEN25_7B_YARN["rope_scaling"] | {key: value}
            if understood(parse, "verifier", QWEN25_7B_YARN | {"rope_scaling": rope}):
                assert value is None or isinstance(value, int | float) and math.isfinite(value), (key, value)
    llama3 = LLAMA_31_8B["rope_scaling"]
    for change, words in (
        ({"rope_scaling": llama3 | {"low_freq_factor": 4.0}}, "low_freq_factor"),
        ({"rope_scaling": llama3, "rope_parameters": {"rope_type": "default"}}, "rope_scaling beside"),
        ({"eos_token_id": LLAMA_31_8B["vocab_size"]}, "eos_token_id"),
        ({"layer_types": [3]}, "layer_types"),
        ({"layer_types": "full_attention"}, "layer_types"),
    ):
        refused(lambda change=change: parse("verifier", {**LLAMA_31_8B, **change}), words)
    tree = {"treeflash_config": {"candidate_tokens": 2**31}}
    refused(lambda: parse("drafter", {**TREEFLASH_4B, **tree}), "candidate_tokens")


@pytest.mark.parametrize("part", ["verifier", "drafter"])
def test_layers_that_the_tensors_lack(part, tmp_path):
    """At once: specs of 10^9 layers would never be built."""
    folder = shutil.copytree(locate("tiny", part), tmp_path / part)
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    for count in (layers + 1, 10**5, 10**9):
        change_json(folder / "config.json", num_hidden_layers=count, layer_types=None)
        refused(lambda: tf.load(**{"verifier": "tiny", part: folder}), f"got {count:,} layers, expected")
    (folder / "model.safetensors").unlink()
    refused(lambda: tf.load(**{"verifier": "tiny", part: folder}), "expected at most 1,000")


def test_experts_that_the_tensors_lack(tmp_path):
    folder = shutil.copytree(DATA / "qwen3_moe" / "apart", tmp_path / "apart")
    change_json(folder / "config.json", num_local_experts=10**9)
    refused(lambda: models.load_verifier(folder), "1,000,000,000 of model.layers.")


def test_files_of_json(tmp_path):
    path = tmp_path / "generation_config.json"
    for text in ("", "{", "[]", "3", "[" * 200_000, '{"a": ' * 50_000, '{"eos_token_id": ' + "9" * 5000 + "}", "\ud800"):
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        refused(lambda: models.stop_ids(tmp_path, RANDOM_MODEL), str(path)) if len(str(path)) < 150 else None
    for content in ('{"eos_token_id": 64}', '{"eos_token_id": "2"}'):
        path.write_text(content)
        refused(lambda: models.stop_ids(tmp_path, RANDOM_MODEL), "eos_token_id")
    path.unlink()
    path.symlink_to(tmp_path / "nowhere")
    refused(lambda: models.stop_ids(tmp_path, RANDOM_MODEL), "not found")


def test_weights_that_are_no_numbers():
    for dtype in (np.float16, np.float32, np.float64, bfloat16):
        values = np.random.default_rng(0).normal(size=(300, 700)).astype(dtype)
        largest = np.full((3, 5), np.finfo(np.float16).max if dtype is np.float16 else 3e38, dtype)
        assert storage.all_finite(values) and storage.all_finite(values.T) and storage.all_finite(-largest)
        for bad in (math.nan, math.inf, -math.inf):
            for place in ((0, 0), (150, 350), (-1, -1)):
                spoilt = values.copy()
                spoilt[place] = bad
                assert not storage.all_finite(spoilt) and not storage.all_finite(spoilt.T)
