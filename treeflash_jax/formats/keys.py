"""Values of a config file, read by key. Each must have its type and be within its limits, or a one-line error is raised."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treeflash_jax.core.checks import INT32, coerce, expect
from treeflash_jax.core.error_text import quoted, warn

# Keys that may change outputs: of models, rope settings, drafters and GGUF files. They are refused unless a reader
# implements them. Keys that are neither here nor known to a reader of configs are ignored with a warning, because releases
# of transformers and llama.cpp add keys every month.
NUMERIC_KEYS = frozenset(
    """quantization_config quantization compression_config auto_map text_config v_head_dim q_lora_rank kv_lora_rank
    scale_depth scale_emb dim_model_base residual_multiplier embedding_multiplier attention_multiplier logits_scaling
    logit_scale final_logit_softcapping attn_logit_softcapping query_pre_attn_scalar clip_qkv attention_sink_bias
    attention_chunk_size attn_temperature_tuning no_rope_layers no_rope_layer_interval alibi rotary_pct rotary_dim
    n_shared_experts routed_scaling_factor scoring_func hidden_activation hidden_activation_function

    alpha attention_factor attn_factor beta_fast beta_slow extrapolation_factor factor high_freq_factor long_factor
    llama_4_scaling_beta low_freq_factor mscale mscale_all_dim mrope_interleaved mrope_section
    original_max_position_embeddings short_factor truncate

    attention_k_eq_v causal causal_head conv_group_size conv_kernel_size dspark_backbone_conv_enabled emb_dim gru_hidden_dim
    is_causal lilicorr_enabled markov_head_type markov_rank output_multiplier projector_type swa_window_size use_swa
    pure_draft_prefix_len sample_from_anchor selector_rank selector_top_k shift_label sliding_window_non_causal
    next_layer_regular parallel_draft_step use_input_layernorm_in_first_layer use_last_layernorm use_mtp_layernorm

    embedding_scale residual_scale router_logit_softcapping use_parallel_residual expert_gating_func expert_group_count
    expert_group_used_count expert_weights_norm expert_weights_scale interleave_moe_layer_step leading_dense_block_count
    moe_every_n_layers attention.causal attention.clamp_kqv attention.kv_lora_rank attention.layer_norm_epsilon
    attention.max_alibi_bias attention.output_scale attention.q_lora_rank attention.scale attention.shared_kv_layers
    attention.sliding_window_pattern attention.temperature_length attention.temperature_scale attention.value_scale
    rope.dimension_sections rope.scaling.alpha""".split()
)


@dataclass(frozen=True)
class Keys:
    """An object in a config file. `where` is the file and the path of keys inside it, for messages."""

    raw: Mapping[str, Any]
    where: str

    def __contains__(self, key: str) -> bool:
        """Returns whether the key exists and is not null."""
        return self.raw.get(key) is not None

    def integer(self, key: str, default: Any = None, least: int = 1, most: int = INT32) -> int:
        says = f"a whole number of at least {least}" + ("" if most == INT32 else f" and at most {most}")
        return self.value(int, key, default, says, least=least, most=most)

    def number(self, key: str, default: Any = None, least: float | None = None) -> float:
        """Returns a number above 0, or of at least `least`."""
        if least is None:
            return self.value(float, key, default, "a number above 0", above=0)
        return self.value(float, key, default, f"a number of at least {least}", least=least)

    def truth(self, key: str, default: Any = None) -> bool:
        return self.value(bool, key, default, "true or false")

    def table(self, key: str, required: bool = False) -> "Keys":
        """Returns an object inside this one. An optional object that is missing counts as empty."""
        raw = self.value(dict[str, Any], key, None, "an object") if key in self or required else {}
        return Keys(raw, f"{self.where}: {key}")

    def ids(self, key: str, most: int, required: bool = True) -> tuple[int, ...]:
        """Returns the ids of a key whose value is an id or a list of ids; () if it is missing and not required."""
        value = self.raw.get(key)
        if not required and value in (None, []):
            return ()
        value = value if isinstance(value, list | tuple) else [value]
        says = f"ids (whole numbers from 0 to {most})"
        return coerce(Sequence[int], value, f"{key} =", self.where, says=says, least=0, most=most, min_length=1)

    def value(self, kind: Any, key: str, default: Any, says: str, **limits: Any) -> Any:
        """Returns the value of a key, converted to a type or type hint. `default` replaces a missing key, but not null."""
        return coerce(kind, self.raw.get(key, default), f"{key} =", self.where, says=says, **limits)

    def expect(self, is_met: bool, key: str, value: Any, expected: str) -> None:
        """Raises ValueError with the value and what was expected, unless `is_met`."""
        expect(is_met, key, value, expected, self.where)

    def check_known(self, known: Collection[str]) -> None:
        """Warns of keys that are not in `known`. Raises ValueError if one of them is in NUMERIC_KEYS."""
        unknown = sorted(set(self.raw) - set(known))
        if changing := NUMERIC_KEYS.intersection(unknown):
            raise ValueError(f"{self.where}: got key {quoted(min(changing))}, which changes numbers and is not implemented")
        if unknown:
            warn(f"{self.where}: unknown keys {quoted(unknown, 160)} are ignored")

    def check_only(self, accepted: Mapping[str, tuple[Any, ...]]) -> None:
        """Raises ValueError for a value that is not implemented. A missing key has the first value. 1 is not true."""
        for key, values in accepted.items():
            value = self.raw.get(key, values[0])
            if not any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in values):
                raise ValueError(f"{self.where}: {key} = {quoted(value)} is not implemented, expected {values[0]!r}")


def find_key(*places: tuple[Keys, str]) -> tuple[Keys, str]:
    """Returns the first of several places (object and key) that has a value; the first place if none has.

    Raises ValueError if two places have different values.
    """
    stated = [(keys, key) for keys, key in places if key in keys]
    if any(keys.raw[key] != stated[0][0].raw[stated[0][1]] for keys, key in stated):
        got = " and ".join(f"{key} {quoted(keys.raw[key])}" for keys, key in stated)
        raise ValueError(f"{places[0][0].where}: got {got}, expected one value")
    return stated[0] if stated else places[0]
