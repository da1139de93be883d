"""Metadata of Gemma 4's GGUF files, which have two kinds of layers, as keys of config.json.

In the metadata, sizes without a suffix are for full attention; sizes with "_swa" are for layers with a window.

Source: ggml-org/llama.cpp, conversion/gemma.py.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from treeflash_jax.formats.architectures.architecture import FULL, SLIDING
from treeflash_jax.formats.keys import Keys
from treeflash_jax.models.config import ModelConfig

ROPE_DIVISORS = "rope_freqs.weight"  # divisors for full attention: 1 for pairs that are rotated
NAMES = {
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}
_SIZES = {  # keys of config.json that are 0 or absent if the model lacks the part
    "num_kv_shared_layers": "attention.shared_kv_layers",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    "num_experts": "expert_count",
    "top_k_experts": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_OF_WINDOWS = {  # keys of a model with one kind of layer
    "attention.key_length": "attention.key_length_swa",
    "attention.value_length": "attention.value_length_swa",
    "rope.dimension_count": "rope.dimension_count_swa",
    "rope.freq_base": "rope.freq_base_swa",
}
_KEYS_AND_VALUES = re.compile(r"blk\.(\d+)\.attn_(k|v|k_norm)\.")
_READ_HERE = ("attention.sliding_window_pattern", "attention.sliding_window", "final_logit_softcapping")


def split_keys(keys: Keys, tensors: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the metadata as if all layers had a window, and keys of config.json for the other layers.

    Raises ValueError for lists that do not match, or a rotation that is not implemented.
    """
    count = keys.integer("block_count")
    head_dim = keys.integer("attention.key_length")
    pattern = keys.value(list[bool], "attention.sliding_window_pattern", None, "true or false for each layer")
    keys.expect(len(pattern) == count, "attention.sliding_window_pattern", pattern, f"one for each of {count} layers")
    types = [SLIDING if is_windowed else FULL for is_windowed in pattern]
    keys.expect({*types} == {FULL, SLIDING}, "attention.sliding_window_pattern", pattern, "layers of both kinds")
    hf_keys = {name: keys.integer(key, 0, least=0) for name, key in _SIZES.items()}
    num_shared = hf_keys["num_kv_shared_layers"]
    first_full = types.index(FULL)
    kv_heads = _by_layer(keys, "attention.head_count_kv", count)
    keys.expect(
        all(kv_heads[i] == kv_heads[types.index(kind)] for i, kind in enumerate(types)),
        "attention.head_count_kv", kv_heads, "one number for layers of one kind",
    )  # fmt: skip
    widths = _by_layer(keys, "feed_forward_length", count)
    wide = 2 if num_shared and widths[-1] != widths[0] else 1
    expected = [widths[0]] * (count - num_shared) + [wide * widths[0]] * num_shared
    keys.expect(widths == expected, "feed_forward_length", widths, "one width, doubled in layers that share")
    is_same = f"blk.{first_full}.attn_v.weight" not in tensors
    keys.expect(is_same or len({*kv_heads}) == 1, "attention.head_count_kv", kv_heads, "one number for all layers")
    hf_keys |= {
        "layer_types": types,
        "global_head_dim": head_dim,
        "attention_k_eq_v": is_same,
        "num_global_key_value_heads": kv_heads[first_full],
        "use_double_wide_mlp": wide == 2,
        "enable_moe_block": hf_keys["num_experts"] > 0,
        "sliding_window": keys.integer("attention.sliding_window"),
        "final_logit_softcapping": keys.number("final_logit_softcapping") if "final_logit_softcapping" in keys else None,
        "rope_parameters": _rotations(keys, head_dim, tensors.get(ROPE_DIVISORS)),
    }
    if hf_keys["hidden_size_per_layer_input"]:
        hf_keys["vocab_size_per_layer_input"] = tensors["token_embd.weight"].shape[0]
    replaced = {name: keys.raw[key] for name, key in _OF_WINDOWS.items() if key in keys}
    replaced |= {"attention.head_count_kv": kv_heads[types.index(SLIDING)], "feed_forward_length": widths[0]}
    dropped = {*_SIZES.values(), *_OF_WINDOWS.values(), *_READ_HERE}
    return {name: value for name, value in (keys.raw | replaced).items() if name not in dropped}, hf_keys


def is_read(name: str, config: ModelConfig) -> bool:
    """Returns False for keys and values of layers that share another layer's."""
    match = _KEYS_AND_VALUES.match(name)
    return not (match and int(match[1]) < config.num_layers and config.kinds[int(match[1])].startswith("shared_"))


def _by_layer(keys: Keys, name: str, count: int) -> list[int]:
    """Returns the value for each layer, for a key that has one value for all layers or a list."""
    value = keys.value(int | list[int], name, None, f"a whole number, or {count} of them", least=1)
    values = value if isinstance(value, list) else [value] * count
    keys.expect(len(values) == count, name, value, f"one for each of {count} layers")
    return values


def _rotations(keys: Keys, head_dim: int, divisors: Any) -> dict[str, Any]:
    divisors = np.ones(head_dim // 2) if divisors is None else divisors[:]
    rotated = int(np.sum(divisors == 1))
    is_known = divisors.shape == (head_dim // 2,) and (divisors[:rotated] == 1).all() and (divisors[rotated:] >= 1e20).all()
    keys.expect(is_known, ROPE_DIVISORS, list(divisors.shape), f"{head_dim // 2} divisors: 1, then 1e30 where none rotates")
    full = {"rope_type": "proportional", "partial_rotary_factor": 2 * rotated / head_dim}
    return {
        FULL: full | {"rope_theta": keys.number("rope.freq_base", 1_000_000.0)},
        SLIDING: {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10_000.0)},
    }
