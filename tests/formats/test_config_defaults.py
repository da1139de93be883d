"""Keys that a config.json lacks: the default of the family's configuration class in transformers, or a refusal."""

from dataclasses import replace

import pytest
from published_configs import parse, without

from treeflash_jax.formats.architectures import ARCHITECTURES
from treeflash_jax.models.config import ModelConfig

SIZES = {
    "vocab_size": 96, "hidden_size": 6144, "intermediate_size": 160, "num_hidden_layers": 6, "num_attention_heads": 64,
    "num_key_value_heads": 16, "head_dim": 96, "rms_norm_eps": 0.25, "max_position_embeddings": 640,
    "tie_word_embeddings": True, "eos_token_id": 7,
}  # fmt: skip
ROPE = {"rope_theta": 12345.0, "rope_scaling": None, "rope_parameters": None}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 160, "rope_theta": 12345.0}
LINEAR = {
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 24, "linear_value_head_dim": 40,
    "linear_conv_kernel_dim": 5, "layer_types": ["full_attention", "linear_attention"] * 3, "partial_rotary_factor": 0.5,
}  # fmt: skip
EXPERTS = {"num_experts": 24, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
DENSE_LAYERS = {"decoder_sparse_step": 2, "mlp_only_layers": [1]}
SHARED = {"shared_expert_intermediate_size": 56}
WINDOWS = {"layer_types": ["full_attention", "sliding_attention"] * 3, "sliding_window": 40}
GEMMA = {
    "layer_types": ["full_attention", "sliding_attention", "full_attention"] * 2, "sliding_window": 40,
    "global_head_dim": 160, "num_global_key_value_heads": 8, "attention_k_eq_v": True, "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True, "final_logit_softcapping": 20.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 54321.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 12345.0},
    },
}  # fmt: skip
EXPERTS_BESIDE = {"enable_moe_block": True, "num_experts": 24, "top_k_experts": 3, "moe_intermediate_size": 48}
CONFIGS = {  # every key that is read, with another value than its default
    "llama": SIZES | ROPE,
    "qwen2": SIZES | ROPE,
    "qwen3": SIZES | ROPE,
    "qwen3_moe": SIZES | ROPE | EXPERTS | DENSE_LAYERS | {"norm_topk_prob": True},
    "qwen3_5_text": SIZES | ROPE | LINEAR,
    "qwen3_5_moe_text": SIZES | ROPE | LINEAR | EXPERTS | SHARED,
    "qwen3_next": SIZES | ROPE | LINEAR | EXPERTS | SHARED | DENSE_LAYERS | {"norm_topk_prob": False},
    "gemma4_text": SIZES | GEMMA | EXPERTS_BESIDE | {"hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": 96},
    "gemma4_unified_text": SIZES | GEMMA,
    "gpt_oss": SIZES | ROPE | WINDOWS | {"num_local_experts": 24, "num_experts_per_tok": 3, "swiglu_limit": 5.0},
}  # fmt: skip
ROPES = (
    {}, {"rope_theta": 12345.0}, {"rope_parameters": {}}, {"rope_parameters": {"rope_type": "default"}},
    {"rope_scaling": YARN}, {"rope_scaling": without(YARN, "rope_theta")}, {"rope_parameters": YARN | {"truncate": False}},
)  # fmt: skip


def read(raw: dict) -> ModelConfig | None:
    """The config but for stop ids, which generation_config.json and tokenizers also name; None if it is refused."""
    try:
        return replace(parse("verifier", raw), eos_token_ids=())
    except ValueError:
        return None


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_absent_keys_have_the_defaults_of_the_family(family):
    """Regression: gpt-oss had no YaRN, theta 10,000 and eps 1e-6; Qwen3-Next 8 experts per token."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    raw = {"model_type": family} | CONFIGS[family]
    assert {key.name for key in ARCHITECTURES[family].keys} <= raw.keys() and read(raw) is not None

    def completed(lacking: dict) -> dict:
        """The same with the keys that transformers adds."""
        full = CONFIG_MAPPING[family](**without(lacking, "model_type")).to_dict()
        return lacking | {key: value for key, value in full.items() if key in raw}

    has_default = set()
    plain = without(raw, *ROPE, "partial_rotary_factor")
    for lacking in (*(without(raw, key) for key in raw if key != "model_type"), *(plain | rope for rope in ROPES)):
        if (config := read(lacking)) is not None:
            [*absent] = raw.keys() - lacking.keys()
            assert config == read(completed(lacking)), absent
            has_default.update(absent)
    usual = {"rms_norm_eps", "rope_theta", "num_key_value_heads", "tie_word_embeddings"}
    assert usual & raw.keys() <= has_default
