"""Configs: published files read right, and everything that might change the numbers is refused in one line."""

from __future__ import annotations

from dataclasses import replace

import pytest
from published_configs import LLAMA_31_8B, QWEN3_4B, TREEFLASH_4B, without
from refusals import refused

from treeflash_jax.drafters.block.block_config import DrafterConfig, default_target_layers
from treeflash_jax.formats.architectures import ARCHITECTURES
from treeflash_jax.formats.dialects import parse
from treeflash_jax.models.config import ModelConfig, Rope


def test_qwen3_4b():
    assert parse("verifier", QWEN3_4B) == ModelConfig(
        vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_layers=36, num_heads=32, num_kv_heads=8,
        head_dim=128, rms_norm_eps=1e-6, rope=Rope(theta=1e6), max_positions=40960, tie_embeddings=True, qk_norm=True,
        model_type="qwen3", eos_token_ids=(151645,),
    )  # fmt: skip


def test_llama_31_8b():
    rope = Rope(
        theta=5e5, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
    )
    assert parse("verifier", LLAMA_31_8B) == ModelConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8,
        head_dim=128, rms_norm_eps=1e-5, rope=rope, max_positions=131072, tie_embeddings=False, qk_norm=False,
        model_type="llama", eos_token_ids=(128001, 128008, 128009),
    )  # fmt: skip


def test_smollm2_135m():
    """Keys that the Hub's own SmolLM2 folders and older Llamas carry."""
    raw = {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
        "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "model_type": "llama",
        "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "use_cache": True,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}}, "vocab_size": 49152,
    }  # fmt: skip
    config = parse("verifier", raw)
    assert config == parse("verifier", without(raw, "is_llama_config", "rope_interleaved", "transformers.js_config"))
    assert config == parse("verifier", raw | {"max_sequence_length": 2048, "pad_token_id": -1})
    with pytest.raises(ValueError, match="rope_interleaved = True is not implemented"):
        parse("verifier", raw | {"rope_interleaved": True})


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SLOW = {**LLAMA3, "factor": 32.0}
WINDOW = {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 21, "use_mrope": False}
# One file for each set of keys: model_type, vocabulary, hidden, ffn, layers, heads, kv heads, head size, rope base
# (None: no key), positions, tied; other keys.
HUB = {
    "Qwen3-4B-Instruct-2507": ("qwen3", 151936, 2560, 9728, 36, 32, 8, 128, 5e6, 262144, True, {}),
    "Qwen3-8B": ("qwen3", 151936, 4096, 12288, 36, 32, 8, 128, 1e6, 40960, False, {}),
    "Qwen3-8B saved by transformers 4.56": (
        "qwen3", 151936, 4096, 12288, 36, 32, 8, 128, 1e6, 40960, False,
        {"dtype": "bfloat16", "layer_types": ["full_attention"] * 36, "unsloth_version": "2025.9"},
    ),
    "Qwen2.5-0.5B": ("qwen2", 151936, 896, 4864, 24, 14, 2, None, 1e6, 32768, True, WINDOW),
    "Llama-2-7b-hf": (
        "llama", 32000, 4096, 11008, 32, 32, 32, None, None, 4096, False, {"_name_or_path": "x", "max_length": 4096},
    ),
    "llama-7b": (
        "llama", 32000, 4096, 11008, 32, 32, None, None, None, 2048, False,
        {"max_sequence_length": 2048, "pad_token_id": 0},
    ),
    "Meta-Llama-3-8B": ("llama", 128256, 4096, 14336, 32, 32, 8, None, 5e5, 8192, False, {}),
    "Llama-3.2-1B-Instruct": (
        "llama", 128256, 2048, 8192, 16, 32, 8, 64, 5e5, 131072, True,
        {"rope_scaling": {**SLOW, "rope_type": "llama3"}, "unsloth_fixed": True, "pad_token_id": 128004},
    ),
    "TinyLlama-1.1B-Chat-v1.0": ("llama", 32000, 2048, 5632, 22, 32, 4, None, 1e4, 2048, False, {}),
    "SmolLM-135M": ("llama", 49152, 576, 1536, 30, 9, 3, None, 1e4, 2048, True, {"bos_token_id": 0, "eos_token_id": 0}),
    "SmolLM2-1.7B-Instruct": (
        "llama", 49152, 2048, 8192, 24, 32, 32, None, 130000, 8192, True,
        {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}},
    ),
    "a head size of null": ("llama", 32000, 2048, 5632, 22, 32, 4, None, 1e4, 2048, False, {"head_dim": None}),
    "a whole dump of old settings": (
        "llama", 32000, 2048, 5632, 22, 32, 4, None, 1e4, 2048, False,
        {"pruned_heads": {}, "num_beams": 1, "temperature": 1.0, "tf_legacy_loss": False, "suppress_tokens": None,
         "_flash_attn_2_enabled": True, "use_mrope": False, "torchscript": False, "is_decoder": False},
    ),
}  # fmt: skip
HUB_REFUSED = {
    "4 bits": ({"quantization_config": {"bits": 4, "quant_method": "gptq"}}, "quantization_config"),
    "MLX": ({"quantization": {"group_size": 64, "bits": 4}}, "quantization"),
    "sparse": ({"compression_config": {"sparsity_config": {}}}, "compression_config"),
    "own code": ({"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}, "auto_map"),
    "scaled as MiniCPM": ({"scale_depth": 1.4}, "scale_depth"),
    "sinks": ({"attention_sink_bias": True}, "attention_sink_bias"),
    "values of another size": ({"v_head_dim": 64}, "v_head_dim"),
    "pruned": ({"pruned_heads": {"0": [1]}}, "pruned_heads"),
    "rope of three axes": ({"use_mrope": True}, "use_mrope"),
    "linear rope": ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "linear"),
    "dynamic rope": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
    "a text model inside": ({"text_config": {"hidden_size": 8}}, "text_config"),
}


def hub_file(model_type, vocab, hidden, ffn, layers, heads, kv_heads, head_dim, theta, positions, tied, extra) -> dict:
    raw = {
        "architectures": ["X"], "model_type": model_type, "vocab_size": vocab, "hidden_size": hidden,
        "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads, "hidden_act": "silu",
        "max_position_embeddings": positions, "tie_word_embeddings": tied, "rms_norm_eps": 1e-05, "use_cache": True,
        "initializer_range": 0.02, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16", "rope_scaling": None,
        "transformers_version": "4.51.0", "attention_bias": False, "attention_dropout": 0.0,
    }  # fmt: skip
    stated = {"num_key_value_heads": kv_heads, "head_dim": head_dim, "rope_theta": theta}
    return raw | {key: value for key, value in stated.items() if value is not None} | extra


@pytest.mark.parametrize("row", HUB.values(), ids=HUB)
def test_configs_of_the_hub(row):
    """Every key that these files carry is used or known to be inert."""
    config = parse("verifier", hub_file(*row))
    model_type, vocab, hidden, ffn, layers, heads, kv_heads, head_dim, theta, positions, tied, extra = row
    scaling = extra.get("rope_scaling")
    assert config == ModelConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=ffn, num_layers=layers, num_heads=heads,
        num_kv_heads=kv_heads or heads, head_dim=head_dim or hidden // heads, rms_norm_eps=1e-5, max_positions=positions,
        tie_embeddings=tied, qk_norm=model_type == "qwen3", qkv_bias=model_type == "qwen2", model_type=model_type,
        eos_token_ids=(extra.get("eos_token_id", 2),),
        rope=Rope(
            theta=theta or 1e4, kind="llama3", factor=scaling["factor"], low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_positions=8192,
        ) if scaling else Rope(theta=theta or 1e4),
    )  # fmt: skip


@pytest.mark.parametrize("change, word", HUB_REFUSED.values(), ids=HUB_REFUSED)
def test_configs_of_the_hub_that_mean_other_numbers(change, word):
    for name in ("Qwen3-8B", "TinyLlama-1.1B-Chat-v1.0"):
        refused(lambda name=name: parse("verifier", hub_file(*HUB[name]) | change), word)


def test_treeflash_drafter():
    config = parse("drafter", TREEFLASH_4B)
    assert config == DrafterConfig(
        layers=replace(parse("verifier", QWEN3_4B), num_layers=5, tie_embeddings=False), block_size=16,
        mask_token_id=151669, target_layer_ids=(1, 9, 17, 25, 33), num_target_layers=36, head="mlp", num_nodes=64,
    )  # fmt: skip
    assert config.num_depths == 15
    config.fitted(parse("verifier", QWEN3_4B))


def test_dflash_drafter_and_heads():
    plain = parse("drafter", without(TREEFLASH_4B, "treeflash_config"))
    assert (plain.head, plain.num_nodes, plain.drafter_temperature) == ("marginal", 16, 1.0)
    for name, head in ((None, "marginal"), ("swiglu", "mlp"), ("linear", "linear")):
        raw = {**TREEFLASH_4B, "treeflash_config": {"ar_approximation": name, "drafter_temperature": 0.5}}
        assert (parse("drafter", raw).head, parse("drafter", raw).drafter_temperature) == (head, 0.5)
    measured = {**TREEFLASH_4B, "treeflash_config": {"ar_approximation": "swiglu", "sampled_above": 0.8}}
    assert (plain.sampled_above, parse("drafter", measured).sampled_above) == (None, 0.8)
    inner = {**TREEFLASH_4B["dflash_config"], "block_size": 10}
    assert parse("drafter", {**without(TREEFLASH_4B, "block_size"), "dflash_config": inner}).block_size == 10


def test_default_target_layers():
    """The published ids of Qwen3-4B (36 layers) and Qwen3-Coder-30B (48 layers), and the one-feature rule."""
    assert default_target_layers(36, 5) == (1, 9, 17, 25, 33)
    assert default_target_layers(48, 5) == (1, 12, 23, 34, 45)
    assert default_target_layers(36, 1) == (18,)
    unnamed = {**TREEFLASH_4B, "dflash_config": {"mask_token_id": 151669}}
    assert parse("drafter", unnamed).target_layer_ids == (1, 9, 17, 25, 33)


@pytest.mark.parametrize("raw", [QWEN3_4B, LLAMA_31_8B], ids=["default", "llama3"])
def test_both_rope_spellings(raw):
    old = {"rope_type": "default", **(raw["rope_scaling"] or {})}
    new = {**without(raw, "rope_theta", "rope_scaling"), "rope_parameters": {**old, "rope_theta": raw["rope_theta"]}}
    oldest = {**raw, "rope_scaling": {**without(old, "rope_type"), "type": old["rope_type"]}}
    assert parse("verifier", new) == parse("verifier", oldest) == parse("verifier", raw)


def test_yarn():
    """Qwen3's documented recipe, and the keys that stand for others."""
    recipe = QWEN3_4B | {"rope_scaling": YARN, "max_position_embeddings": 131072}
    rope = parse("verifier", recipe).rope
    assert rope == Rope(
        theta=1e6, kind="yarn", factor=4.0, original_max_positions=32768, attention_factor=rope.attention_factor
    )
    assert rope.attention_factor == pytest.approx(1.1386294361, abs=1e-9)
    for same in (
        {"rope_scaling": YARN | {"factor": None}},
        {"rope_scaling": YARN | {"beta_fast": None, "attention_factor": None, "mscale": 1.0, "mscale_all_dim": 0.0}},
        {"rope_scaling": without(YARN, "original_max_position_embeddings"), "original_max_position_embeddings": 32768},
        {"rope_scaling": YARN | {"original_max_position_embeddings": 8}, "original_max_position_embeddings": 32768},
    ):
        assert parse("verifier", recipe | same).rope == rope
    nowhere = recipe | {"rope_scaling": without(YARN, "original_max_position_embeddings")}
    assert parse("verifier", nowhere).rope.original_max_positions == 131072
    assert parse("verifier", recipe | {"rope_scaling": YARN | {"attention_factor": 0.9}}).rope.attention_factor == 0.9
    written = ARCHITECTURES["qwen3"].to_hf(parse("verifier", recipe))
    assert parse("verifier", written) == parse("verifier", recipe)


def test_qwen2_refuses_what_its_layers_do_not_have():
    for change, words in (({"attention_bias": True}, ("attention_bias",)), ({"head_dim": 32}, ("head_dim 32", "896"))):
        refused(lambda change=change: parse("verifier", hub_file(*HUB["Qwen2.5-0.5B"]) | change), *words)
    config = parse("verifier", hub_file(*HUB["Qwen2.5-0.5B"]))
    assert parse("verifier", hub_file(*HUB["Qwen2.5-0.5B"]) | {"head_dim": 64}) == config
    assert parse("verifier", ARCHITECTURES["qwen2"].to_hf(config)) == config


def test_missing_defaults_are_those_of_the_architectures():
    assert parse("verifier", without(LLAMA_31_8B, "num_key_value_heads")).num_kv_heads == 32
    assert parse("verifier", without(QWEN3_4B, "head_dim")).head_dim == 128
    assert parse("verifier", {**LLAMA_31_8B, "hidden_size": 2048}).head_dim == 64
    assert parse("verifier", without(QWEN3_4B, "eos_token_id")).eos_token_ids == ()


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
BAD_MODELS = {
    "unknown key": ({"residual_multiplier": 0.22}, ("residual_multiplier",)),
    "quantised": ({"quantization_config": {"bits": 4}}, ("quantization_config",)),
    "gelu": ({"hidden_act": "gelu"}, ("hidden_act", "gelu")),
    "attention bias": ({"attention_bias": True}, ("attention_bias", "True")),
    "mlp bias": ({"mlp_bias": True}, ("mlp_bias", "True")),
    "window": ({"use_sliding_window": True}, ("use_sliding_window", "True")),
    "sliding layers": ({"layer_types": ["full_attention", "sliding_attention"]}, ("sliding_attention",)),
    "partial rotation": ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor", "0.5")),
    "partial rotation inside": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ("partial_rotary_factor",)),
    "yarn without a factor": ({"rope_scaling": without(YARN, "factor")}, ("factor", "None")),
    "yarn that speeds up": ({"rope_parameters": YARN | {"factor": 0.5}}, ("factor", "0.5")),
    "yarn for fewer positions": ({"rope_scaling": YARN | {"factor": None}, "max_position_embeddings": 4096}, ("0.125",)),
    "yarn with another key": ({"rope_scaling": YARN | {"attn_factor": 1.0}}, ("attn_factor", "yarn")),
    "yarn the wrong way round": ({"rope_scaling": YARN | {"beta_fast": 1.0}}, ("beta_fast 1.0", "beta_slow 1.0")),
    "yarn of no context": ({"rope_scaling": YARN | {"original_max_position_embeddings": 0}}, ("original_max", "0")),
    "yarn with text for truth": ({"rope_scaling": YARN | {"truncate": "no"}}, ("truncate", "no")),
    "yarn on one frequency": ({"rope_scaling": YARN, "rope_theta": 1.0}, ("rope_theta 1.0", "yarn")),
    "yarn that stops attention": ({"rope_scaling": YARN | {"attention_factor": 0}}, ("attention_factor", "0")),
    "two rope types": ({"rope_scaling": {"rope_type": "default", "type": "yarn"}}, ("default", "yarn")),
    "llama3 that speeds up": ({"rope_scaling": {**LLAMA3, "rope_type": "llama3", "factor": 0.5}}, ("factor", "0.5")),
    "llama3 without a factor": ({"rope_scaling": {**LLAMA3, "rope_type": "llama3", "factor": None}}, ("factor", "None")),
    "half a llama3": ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ("low_freq_factor",)),
    "mixture of experts": ({"model_type": "mixtral"}, ("mixtral",)),
    "attention factor": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "attention_factor": 2.0}},
        ("attention_factor",),
    ),
    "rope of several layer kinds": ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, ("full_attention",)),
    "two rope bases": ({"rope_parameters": {"rope_theta": 5e5}}, ("rope_theta", "500000", "1000000")),
    "rope as text": ({"rope_scaling": "yarn"}, ("rope_scaling", "yarn")),
    "eps as null": ({"rms_norm_eps": None}, ("rms_norm_eps", "None")),
    "eps as text": ({"rms_norm_eps": "x"}, ("rms_norm_eps", "x")),
    "negative head": ({"head_dim": -1}, ("head_dim", "-1")),
    "odd head": ({"head_dim": 5}, ("head_dim", "5")),
    "fractional head": ({"head_dim": 80.5}, ("head_dim", "80.5")),
    "tied as text": ({"tie_word_embeddings": "false"}, ("tie_word_embeddings", "false")),
    "stop ids as lists": ({"eos_token_id": [[1]]}, ("eos_token_id", "[1]")),
    "too few layer types": ({"layer_types": ["full_attention"]}, ("layer_types", "36")),
    "no model type": ({"model_type": None}, ("model_type", "None")),
    "no size": ({"hidden_size": None}, ("hidden_size", "None")),
    "zero size": ({"num_hidden_layers": 0}, ("num_hidden_layers", "0")),
    "size as text": ({"vocab_size": "151936"}, ("vocab_size", "'151936'")),
    "fractional groups": ({"num_key_value_heads": 5}, ("32", "5")),
    "a drafter": ({"dflash_config": {"mask_token_id": 0}}, ("drafter", "dflash_config")),
}
BAD_DRAFTERS = {
    "unknown key": ({"medusa_heads": 4}, ("medusa_heads",)),
    "unknown inside dflash_config": ({"dflash_config": {"mask_token_id": 1, "causal": True}}, ("dflash_config", "causal")),
    "unknown inside treeflash_config": ({"treeflash_config": {"beam": 3}}, ("treeflash_config", "beam")),
    "unknown head": ({"treeflash_config": {"ar_approximation": "gru"}}, ("ar_approximation", "gru")),
    "head as list": ({"treeflash_config": {"ar_approximation": ["swiglu"]}}, ("ar_approximation", "swiglu")),
    "no budget": ({"treeflash_config": {"candidate_tokens": 0}}, ("candidate_tokens", "0")),
    "cold draft": ({"treeflash_config": {"drafter_temperature": 0}}, ("drafter_temperature", "0")),
    "crossover": ({"treeflash_config": {"sampled_above": "hot"}}, ("sampled_above", "hot")),
    "null dflash_config": ({"dflash_config": None}, ("dflash_config", "None")),
    "layers as text": ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": ["a"]}}, ("target_layer_ids", "a")),
    "null mask": ({"dflash_config": {"mask_token_id": None}}, ("mask_token_id", "None")),
    "no mask": ({"dflash_config": {"target_layer_ids": [1]}}, ("mask_token_id",)),
    "block of one": ({"block_size": 1}, ("block_size", "1")),
    "two block sizes": ({"dflash_config": {"mask_token_id": 1, "block_size": 10}}, ("block_size", "16", "10")),
    "no block size": ({"block_size": None}, ("block_size", "None")),
    "no layer count": ({"num_target_layers": None}, ("num_target_layers", "None")),
    "sliding layers": ({"layer_types": ["sliding_attention"] * 5}, ("sliding_attention",)),
}


@pytest.mark.parametrize("change, words", BAD_MODELS.values(), ids=BAD_MODELS)
def test_bad_verifier_configs(change, words):
    refused(lambda: parse("verifier", {**QWEN3_4B, **change}, "there/config.json"), "there/config.json", *words)


@pytest.mark.parametrize("change, words", BAD_DRAFTERS.values(), ids=BAD_DRAFTERS)
def test_bad_drafter_configs(change, words):
    refused(lambda: parse("drafter", {**TREEFLASH_4B, **change}, "there/config.json"), "there/config.json", *words)


def test_a_verifier_may_draft_for_another():
    drafter = parse("drafter", QWEN3_4B)
    assert (drafter.kind, drafter.layers) == ("language model", parse("verifier", QWEN3_4B))
    unknown = {**QWEN3_4B, "model_type": "gpt2"}
    refused(lambda: parse("drafter", unknown, "there/config.json"), "there/config.json", "gpt2", "dflash_config")
