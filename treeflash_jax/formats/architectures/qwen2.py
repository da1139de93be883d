"""Qwen2 and Qwen2.5: queries, keys and values have biases and are not normalised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treeflash_jax.core.parameters import Entry
from treeflash_jax.formats.architectures import common
from treeflash_jax.formats.architectures.architecture import Architecture
from treeflash_jax.formats.keys import Keys

BIAS: dict[str, Any] = {"order": (0, 1), "row_axes": 2}  # [heads, head_dim] here, [heads head_dim] on disk


def _check_head_dim(keys: Keys, fields: Mapping[str, Any]) -> dict[str, Any]:
    """A head_dim of its own has no meaning that all readers of these files share."""
    if fields["head_dim"] * fields["num_heads"] != fields["hidden_size"]:
        raise ValueError(
            f"{keys.where}: got head_dim {fields['head_dim']} of {fields['num_heads']} heads, expected hidden_size "
            f"{fields['hidden_size']} over the heads"
        )
    return {}


QWEN2 = Architecture(
    model_type="qwen2",
    class_name="Qwen2ForCausalLM",
    keys=common.keys(head_dim=common.even_heads),
    constants={"qk_norm": False, "qkv_bias": True},
    only=common.ONLY | {"attention_bias": (None, False)},  # true would mean that `o` has one, too
    inert=common.INERT,
    derive=_check_head_dim,
    layer=common.LAYER | {f"{name}_bias": Entry(f"self_attn.{name}_proj.bias", **BIAS) for name in ("q", "k", "v")},
    outside=common.OUTSIDE,
    gguf="qwen2",
)
