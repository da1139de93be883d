"""Configs: published files read right, and everything that might change the numbers is refused in one line.

So are layers without tensors, and weights that are not numbers.
"""

import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
from conftest import DATA, RANDOM_MODEL
from ml_dtypes import bfloat16
from model_files import change_json
from published_configs import LLAMA_31_8B, QWEN3_4B, QWEN25_7B_YARN, TREEFLASH_4B, parse, without
from refusals import refused, understood

from treeflash_jax.drafters.block.block_drafter import BlockDrafter, default_target_layers
from treeflash_jax.engine.settings.pairs import locate
from treeflash_jax.formats import model_files, storage
from treeflash_jax.models.config import ModelConfig, Rope


def test_published_files():
    assert parse("verifier", QWEN3_4B) == ModelConfig(
        vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_layers=36, num_heads=32, num_kv_heads=8,
        head_dim=128, rms_norm_eps=1e-6, rope=Rope(theta=1e6), max_positions=40960, tie_embeddings=True, qk_norm=True,
        model_type="qwen3", eos_token_ids=(151645,),
    )  # fmt: skip
    assert parse("verifier", QWEN25_7B_YARN) == ModelConfig(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_layers=28, num_heads=28, num_kv_heads=4,
        head_dim=128, rms_norm_eps=1e-6, max_positions=32768, tie_embeddings=False, qk_norm=False, qkv_bias=True,
        model_type="qwen2", eos_token_ids=(151645,),
        rope=Rope(theta=1e6, kind="yarn", factor=4.0, original_max_positions=32768, attention_factor=0.1 * math.log(4) + 1),
    )  # fmt: skip
    assert parse("verifier", LLAMA_31_8B) == ModelConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8,
        head_dim=128, rms_norm_eps=1e-5, max_positions=131072, tie_embeddings=False, qk_norm=False, model_type="llama",
        eos_token_ids=(128001, 128008, 128009), rope=Rope(
            theta=5e5, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
        ),
    )  # fmt: skip


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
INERT = {  # in files of the Hub: Qwen2 and Qwen3, Llama 1 and 2, SmolLM2, Unsloth, dumps of all settings of transformers
    "dtype": "bfloat16", "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 21, "use_mrope": False,
    "_name_or_path": "x", "max_length": 4096, "max_sequence_length": 2048, "pad_token_id": -1, "is_llama_config": True,
    "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}, "unsloth_version": "2025.9",
    "unsloth_fixed": True, "head_dim": None, "pruned_heads": {}, "num_beams": 1, "temperature": 1.0,
    "tf_legacy_loss": False, "suppress_tokens": None, "_flash_attn_2_enabled": True, "torchscript": False,
    "is_decoder": False,
}  # fmt: skip
UNKNOWN = """quantization_config quantization compression_config auto_map scale_depth attention_sink_bias v_head_dim
    text_config residual_multiplier""".split()  # keys that change numbers
NOT_IMPLEMENTED = {
    "hidden_act": "gelu", "attention_bias": True, "mlp_bias": True, "use_sliding_window": True, "use_mrope": True,
    "pruned_heads": {"0": [1]}, "partial_rotary_factor": 0.5, "rope_interleaved": True,
}  # fmt: skip


@pytest.mark.parametrize("raw", [QWEN3_4B, QWEN25_7B_YARN, LLAMA_31_8B], ids=["qwen3", "qwen2", "llama"])
def test_keys_are_inert_or_refused(raw, caplog):
    full = {"layer_types": ["full_attention"] * raw["num_hidden_layers"]}
    assert parse("verifier", raw | INERT | full) == parse("verifier", raw)
    for key, value in (dict.fromkeys(UNKNOWN, {}) | NOT_IMPLEMENTED).items():
        refused(lambda key=key, value=value: parse("verifier", raw | {key: value}, "there/config.json"), "there/", key)
    assert parse("verifier", raw | {"key_of_next_month": 1}) == parse("verifier", raw)
    assert caplog.messages == ["config.json: unknown keys ['key_of_next_month'] are ignored"]


@pytest.mark.parametrize("table", ["dflash_config", "treeflash_config"])
def test_unknown_keys_inside_the_config_of_a_drafter(table, caplog):
    raw = TREEFLASH_4B | {table: TREEFLASH_4B[table] | {"key_of_next_month": 1}}
    assert parse("drafter", raw) == parse("drafter", TREEFLASH_4B)
    assert caplog.messages == [f"config.json: {table}: unknown keys ['key_of_next_month'] are ignored"]


def test_treeflash_drafter():
    config = parse("drafter", TREEFLASH_4B)
    assert config == BlockDrafter(
        layers=replace(parse("verifier", QWEN3_4B), num_layers=5, tie_embeddings=False), block_size=16,
        mask_token_id=151669, taps=(1, 9, 17, 25, 33), num_target_layers=36, head="mlp", num_nodes=64,
    )  # fmt: skip
    assert config.num_depths == 15
    config.fitted(parse("verifier", QWEN3_4B))


def test_dflash_drafter_and_heads():
    plain = parse("drafter", without(TREEFLASH_4B, "treeflash_config"))
    assert (plain.head, plain.num_nodes, plain.drafter_temperature) == ("marginal", 16, 1.0)
    for name, head in ((None, "marginal"), ("swiglu", "mlp"), ("linear", "linear")):
        raw = {**TREEFLASH_4B, "treeflash_config": {"ar_approximation": name, "drafter_temperature": 0.5}}
        assert (parse("drafter", raw).head, parse("drafter", raw).drafter_temperature) == (head, 0.5)
    measured = {**TREEFLASH_4B, "treeflash_config": {"ar_approximation": "swiglu", "tau": 2.5}}
    assert (plain.tau, parse("drafter", measured).tau) == (None, 2.5)
    inner = {**TREEFLASH_4B["dflash_config"], "block_size": 10}
    assert parse("drafter", {**without(TREEFLASH_4B, "block_size"), "dflash_config": inner}).block_size == 10


def test_default_target_layers(caplog):
    """The published ids of Qwen3-4B (36 layers) and Qwen3-Coder-30B (48 layers), and the one-feature rule."""
    assert default_target_layers(36, 5) == (1, 9, 17, 25, 33)
    assert default_target_layers(48, 5) == (1, 12, 23, 34, 45)
    assert default_target_layers(36, 1) == (18,)
    unnamed = {**TREEFLASH_4B, "dflash_config": {"mask_token_id": 151669}}
    assert parse("drafter", unnamed).taps == (1, 9, 17, 25, 33)
    note = "dflash_config names no target_layer_ids: outputs of layers [1, 9, 17, 25, 33] are read, by DFlash's rule"
    assert caplog.messages == [f"config.json: {note}"]
    refused(lambda: parse("drafter", without(unnamed, "num_target_layers")), "num_target_layers = None")


@pytest.mark.parametrize("raw", [QWEN3_4B, LLAMA_31_8B], ids=["default", "llama3"])
def test_both_rope_spellings(raw):
    old = {"rope_type": "default", **(raw["rope_scaling"] or {})}
    new = {**without(raw, "rope_theta", "rope_scaling"), "rope_parameters": {**old, "rope_theta": raw["rope_theta"]}}
    oldest = {**raw, "rope_scaling": {**without(old, "rope_type"), "type": old["rope_type"]}}
    assert parse("verifier", new) == parse("verifier", oldest) == parse("verifier", raw)


def test_yarn_with_null_keys_or_its_context_outside():
    recipe = QWEN3_4B | {"rope_scaling": YARN, "max_position_embeddings": 131072}
    rope = parse("verifier", recipe).rope
    for same in (
        {"rope_scaling": YARN | {"factor": None}},
        {"rope_scaling": YARN | {"beta_fast": None, "attention_factor": None, "mscale": 1.0, "mscale_all_dim": 0.0}},
        {"rope_scaling": without(YARN, "original_max_position_embeddings"), "original_max_position_embeddings": 32768},
        {"rope_scaling": YARN | {"original_max_position_embeddings": 8}, "original_max_position_embeddings": 32768},
    ):
        assert parse("verifier", recipe | same).rope == rope


def test_heads_of_qwen2_divide_the_hidden_size():
    assert parse("verifier", QWEN25_7B_YARN | {"head_dim": 128}) == parse("verifier", QWEN25_7B_YARN)
    refused(lambda: parse("verifier", QWEN25_7B_YARN | {"head_dim": 32}), "head_dim 32", "3584")


def test_missing_defaults_are_those_of_the_architectures():
    assert parse("verifier", without(LLAMA_31_8B, "num_key_value_heads")).num_kv_heads == 32
    assert parse("verifier", without(QWEN3_4B, "head_dim")).head_dim == 128
    assert parse("verifier", {**LLAMA_31_8B, "hidden_size": 2048}).head_dim == 64
    assert parse("verifier", without(QWEN3_4B, "rope_theta")).rope == Rope(theta=1e4)
    assert parse("verifier", without(QWEN3_4B, "eos_token_id")).eos_token_ids == ()
    assert parse("verifier", QWEN3_4B | {"eos_token_id": 0}).eos_token_ids == (0,)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": [1.0] * 64, "attention_factor": 1.0}
BAD_MODELS = {
    "sliding layers": ({"layer_types": ["full_attention", "sliding_attention"]}, ("sliding_attention",)),
    "partial rotation inside": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ("partial_rotary_factor",)),
    "yarn that speeds up": ({"rope_parameters": YARN | {"factor": 0.5}}, ("factor", "0.5")),
    "yarn for fewer positions": ({"rope_scaling": YARN | {"factor": None}, "max_position_embeddings": 4096}, ("0.125",)),
    "yarn with another key": ({"rope_scaling": YARN | {"attn_factor": 1.0}}, ("attn_factor", "yarn")),
    "yarn the wrong way round": ({"rope_scaling": YARN | {"beta_fast": 1.0}}, ("beta_fast 1.0", "beta_slow 1.0")),
    "yarn on one frequency": ({"rope_scaling": YARN, "rope_theta": 1.0}, ("rope_theta 1.0", "yarn")),
    "two rope types": ({"rope_scaling": {"rope_type": "default", "type": "yarn"}}, ("default", "yarn")),
    "llama3 that speeds up": ({"rope_scaling": {**LLAMA3, "rope_type": "llama3", "factor": 0.5}}, ("factor", "0.5")),
    "half a llama3": ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ("low_freq_factor",)),
    "longrope that grows": ({"rope_scaling": LONG | {"long_factor": [1.0] * 63 + [3.0]}}, ("longrope", "long_factor")),
    "longrope with more attention": ({"rope_scaling": LONG | {"attention_factor": 1.2}}, ("longrope", "attention_factor")),
    "longrope as text": ({"rope_scaling": LONG | {"short_factor": "1"}}, ("short_factor",)),
    "a short longrope": ({"rope_scaling": LONG | dict.fromkeys(["short_factor", "long_factor"], [1.0])}, ("1", "64")),
    "llama3 the wrong way round": (
        {"rope_scaling": {**LLAMA3, "rope_type": "llama3", "low_freq_factor": 4.0}},
        ("low_freq_factor",),
    ),
    "linear rope": ({"rope_scaling": {"type": "linear", "factor": 4.0}}, ("linear",)),
    "mixture of experts": ({"model_type": "mixtral"}, ("mixtral",)),
    "attention factor": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "attention_factor": 2.0}},
        ("attention_factor",),
    ),
    "two rope settings": ({"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}}, ("rope_scaling beside",)),
    "two rope bases": ({"rope_parameters": {"rope_theta": 5e5}}, ("rope_theta", "500000", "1000000")),
    "rope as text": ({"rope_scaling": "yarn"}, ("rope_scaling", "yarn")),
    "eps as null": ({"rms_norm_eps": None}, ("rms_norm_eps", "None")),
    "odd head": ({"head_dim": 5}, ("head_dim", "5")),
    "tied as text": ({"tie_word_embeddings": "false"}, ("tie_word_embeddings", "false")),
    "stop ids as lists": ({"eos_token_id": [[1]]}, ("eos_token_id", "[1]")),
    "stop ids outside": ({"eos_token_id": 151936}, ("eos_token_id",)),
    "layer types as numbers": ({"layer_types": [3]}, ("layer_types",)),
    "layer types as text": ({"layer_types": "full_attention"}, ("layer_types",)),
    "too few layer types": ({"layer_types": ["full_attention"]}, ("layer_types", "36")),
    "zero size": ({"num_hidden_layers": 0}, ("num_hidden_layers", "0")),
    "fractional groups": ({"num_key_value_heads": 5}, ("32", "5")),
}
BAD_DRAFTERS = {
    "a key that changes numbers": ({"logit_scale": 4}, ("logit_scale",)),
    "a head's key": ({"dflash_config": {"mask_token_id": 1, "emb_dim": 3}}, ("dflash_config", "emb_dim")),
    "unknown head": ({"treeflash_config": {"ar_approximation": "ffn"}}, ("ar_approximation", "ffn")),
    "head as list": ({"treeflash_config": {"ar_approximation": ["swiglu"]}}, ("ar_approximation", "swiglu")),
    "cold draft": ({"treeflash_config": {"drafter_temperature": 0}}, ("drafter_temperature", "0")),
    "null dflash_config": ({"dflash_config": None}, ("dflash_config", "None")),
    "block of one": ({"block_size": 1}, ("block_size", "1")),
    "nodes without end": ({"treeflash_config": {"candidate_tokens": 2**31}}, ("candidate_tokens",)),
    "two block sizes": ({"dflash_config": {"mask_token_id": 1, "block_size": 10}}, ("block_size", "16", "10")),
    "no block size": ({"block_size": None}, ("block_size", "None")),
}


BAD = {name: ("verifier", QWEN3_4B, *case) for name, case in BAD_MODELS.items()}
BAD |= {name: ("drafter", TREEFLASH_4B, *case) for name, case in BAD_DRAFTERS.items()}


@pytest.mark.parametrize("part, raw, change, words", BAD.values(), ids=BAD)
def test_bad_configs(part, raw, change, words):
    refused(lambda: parse(part, raw | change, "there/config.json"), "there/config.json", *words)


def test_a_verifier_may_draft_for_another():
    drafter = parse("drafter", QWEN3_4B)
    assert (drafter.kind, drafter.layers) == ("language_model", parse("verifier", QWEN3_4B))
    unknown = {**QWEN3_4B, "model_type": "gpt2"}
    refused(lambda: parse("drafter", unknown, "there/config.json"), "there/config.json", "gpt2", "dflash_config")


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


@pytest.mark.parametrize("source, key, most", [
    (locate("tiny"), "num_hidden_layers", 1000),
    (DATA / "qwen3_moe" / "apart", "num_local_experts", 4096),
])  # fmt: skip
def test_layers_and_experts_that_the_tensors_lack(tmp_path, source, key, most):
    folder = shutil.copytree(source, tmp_path / "model")
    change_json(folder / "config.json", **{key: 100, "layer_types": None})
    refused(lambda: model_files.load_verifier(folder), "tensors missing: ", ", the first is model.layers.")
    change_json(folder / "config.json", **{key: 10**9})
    refused(lambda: model_files.load_verifier(folder), f"{key} = 1000000000", f"at most {most}")


def test_files_of_json(tmp_path):
    path = tmp_path / "generation_config.json"
    for text in ("", "{", "[]", "3", "[" * 200_000, '{"a": ' * 50_000, '{"eos_token_id": ' + "9" * 5000 + "}", "\ud800"):
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        refused(lambda: model_files.stop_ids(tmp_path, RANDOM_MODEL), str(path)) if len(str(path)) < 150 else None
    for content in ('{"eos_token_id": 64}', '{"eos_token_id": "2"}'):
        path.write_text(content)
        refused(lambda: model_files.stop_ids(tmp_path, RANDOM_MODEL), "eos_token_id")
    path.unlink()
    path.symlink_to(tmp_path / "nowhere")
    refused(lambda: model_files.stop_ids(tmp_path, RANDOM_MODEL), "not found")


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
