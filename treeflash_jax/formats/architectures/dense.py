"""Dense families: Llama 2 and 3 (also SmolLM2), Qwen2 and Qwen2.5, and Qwen3. Also the keys and tensor names they share."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from treeflash_jax.core.parameters import Entry
from treeflash_jax.formats.architectures.architecture import Architecture, Key
from treeflash_jax.formats.keys import Keys

MAX_LAYERS = 1000  # limit that is checked before specs of the layers are built
LINEAR: dict[str, Any] = {"order": (1, 0), "row_axes": 1}  # [in, out] here, [out, in] on disk
AS_ON_DISK: dict[str, Any] = {"order": (0, 1), "row_axes": 1}  # [out, in]
TO_HEADS: dict[str, Any] = {"order": (0, 1, 2), "row_axes": 2}  # [heads, head_dim, in] here, [heads head_dim, in] on disk
BIAS: dict[str, Any] = {"order": (0, 1), "row_axes": 2}  # [heads, head_dim] here, [heads head_dim] on disk


def even_heads(keys: Keys, fields: Mapping[str, int]) -> int:
    """Returns hidden_size / num_heads, for files without head_dim. Raises ValueError if it is not whole."""
    width, heads = fields["hidden_size"], fields["num_heads"]
    keys.expect(width % heads == 0, "hidden_size", width, f"a multiple of {heads} heads")
    return width // heads


def size_keys(head_dim: Any, kv_heads: int | None = None, eps: float = 1e-6) -> tuple[Key, ...]:
    """Returns the keys of a dense model, with the defaults of the family's configuration class in transformers.

    Args:
      head_dim: function that computes a missing head_dim, as `Key.default`.
      kv_heads: default of num_key_value_heads; None: num_attention_heads, as for null.
      eps: default of rms_norm_eps.
    """

    def default_kv_heads(keys: Keys, fields: Mapping[str, int]) -> int:
        return fields["num_heads"] if kv_heads is None or "num_key_value_heads" in keys.raw else kv_heads

    return (
        Key(name="vocab_size", field="vocab_size"),
        Key(name="hidden_size", field="hidden_size"),
        Key(name="intermediate_size", field="intermediate_size"),
        Key(name="num_hidden_layers", field="num_layers", most=MAX_LAYERS),
        Key(name="num_attention_heads", field="num_heads"),
        Key(name="num_key_value_heads", field="num_kv_heads", default=default_kv_heads),
        Key(name="head_dim", field="head_dim", default=head_dim),
        Key(name="rms_norm_eps", field="rms_norm_eps", kind=float, default=eps),
        Key(name="max_position_embeddings", field="max_positions"),
        Key(name="tie_word_embeddings", field="tie_embeddings", kind=bool, default=False),
    )


ONLY = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "pretraining_tp": (1, None),
    "use_mrope": (False, None),
    "pruned_heads": ({}, None),
}
# Keys of training, of bookkeeping, of how other programs run a model, and of generation defaults. `sliding_window` and
# `max_window_layers` have an effect only through `use_sliding_window` and `layer_types`, which are checked.
INERT = frozenset(
    """architectures attention_dropout bos_token_id pad_token_id sep_token_id decoder_start_token_id cls_token_id
    dtype torch_dtype initializer_range max_window_layers sliding_window transformers_version use_cache _name_or_path
    _attn_implementation _attn_implementation_autoset return_dict output_hidden_states output_attentions torchscript
    chunk_size_feed_forward is_encoder_decoder id2label label2id problem_type task_specific_params tokenizer_class
    prefix finetuning_task is_decoder add_cross_attention cross_attention_hidden_size tie_encoder_decoder use_bfloat16
    name_or_path unsloth_version unsloth_fixed is_llama_config transformers.js_config
    max_sequence_length tf_legacy_loss _flash_attn_2_enabled _attn_implementation_internal
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens""".split()
)
LAYER = {
    "attention_norm": Entry("input_layernorm.weight"),
    "q": Entry("self_attn.q_proj.weight", **TO_HEADS),
    "k": Entry("self_attn.k_proj.weight", **TO_HEADS),
    "v": Entry("self_attn.v_proj.weight", **TO_HEADS),
    "o": Entry("self_attn.o_proj.weight", order=(0, 1, 2), row_axes=1),
    "mlp_norm": Entry("post_attention_layernorm.weight"),
    "gate": Entry("mlp.gate_proj.weight", **AS_ON_DISK),
    "up": Entry("mlp.up_proj.weight", **AS_ON_DISK),
    "down": Entry("mlp.down_proj.weight", **AS_ON_DISK),
}
OUTSIDE = {
    "embed": Entry("model.embed_tokens.weight", order=(0, 1)),
    "norm": Entry("model.norm.weight"),
    "unembed": Entry("lm_head.weight", order=(0, 1)),
}


def _check_head_dim(keys: Keys, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Raises ValueError for a head_dim other than hidden_size / num_heads: readers of Qwen2 disagree on its meaning."""
    head_dim = fields["head_dim"]
    heads = fields["num_heads"]
    width = fields["hidden_size"]
    keys.expect(head_dim * heads == width, "head_dim", head_dim, f"hidden_size {width} over {heads} heads")
    return {}


LLAMA = Architecture(
    model_type="llama",
    class_name="LlamaForCausalLM",
    keys=size_keys(head_dim=even_heads),
    constants={"qk_norm": False},
    only=ONLY,
    inert=INERT,
    layer=LAYER,
    outside=OUTSIDE,
    gguf="llama",
    gguf_rotates_pairs=True,
)
QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    class_name="Qwen2ForCausalLM",
    keys=size_keys(head_dim=even_heads, kv_heads=32),
    constants={"qk_norm": False, "qkv_bias": True},
    only=ONLY | {"attention_bias": (None, False)},  # with true, `o` would have a bias, too
    derive=_check_head_dim,
    layer=LAYER | {f"{name}_bias": Entry(f"self_attn.{name}_proj.bias", **BIAS) for name in ("q", "k", "v")},
    gguf="qwen2",
    gguf_rotates_pairs=False,
)
QWEN3 = replace(
    LLAMA,
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    keys=size_keys(head_dim=lambda keys, fields: 128, kv_heads=32),
    constants={"qk_norm": True},
    layer=LAYER | {"q_norm": Entry("self_attn.q_norm.weight"), "k_norm": Entry("self_attn.k_norm.weight")},
    gguf="qwen3",
    gguf_rotates_pairs=False,
)
