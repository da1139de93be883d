"""Qwen3, dense."""

from __future__ import annotations

from treeflash_jax.core.parameters import Entry
from treeflash_jax.formats.architectures import common
from treeflash_jax.formats.architectures.architecture import Architecture

QWEN3 = Architecture(
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    keys=common.keys(head_dim=lambda fields: 128),
    constants={"qk_norm": True},
    only=common.ONLY,
    inert=common.INERT,
    layer=common.LAYER | {"q_norm": Entry("self_attn.q_norm.weight"), "k_norm": Entry("self_attn.k_norm.weight")},
    outside=common.OUTSIDE,
    gguf="qwen3",
)
