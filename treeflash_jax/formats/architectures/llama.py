"""Llama 2 and 3, and what has their form, such as SmolLM2."""

from __future__ import annotations

from treeflash_jax.formats.architectures import common
from treeflash_jax.formats.architectures.architecture import Architecture

LLAMA = Architecture(
    model_type="llama",
    class_name="LlamaForCausalLM",
    keys=common.keys(head_dim=common.even_heads),
    constants={"qk_norm": False},
    only=common.ONLY,
    inert=common.INERT,
    layer=common.LAYER,
    outside=common.OUTSIDE,
    gguf="llama",
    gguf_rotates_pairs=True,
)
