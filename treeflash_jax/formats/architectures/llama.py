"""Llama 2 and 3, and what has their form, such as SmolLM2."""

from __future__ import annotations

from collections.abc import Mapping

from treeflash_jax.formats.architectures import common
from treeflash_jax.formats.architectures.record import Architecture


def _head_dim(fields: Mapping[str, int]) -> int:
    width, heads = fields["hidden_size"], fields["num_heads"]
    if width % heads:
        raise ValueError(f"got hidden_size {width} over {heads} heads, expected a multiple")
    return width // heads


LLAMA = Architecture(
    model_type="llama",
    class_name="LlamaForCausalLM",
    keys=common.keys(head_dim=_head_dim),
    constants={"qk_norm": False},
    only=common.ONLY,
    inert=common.INERT,
    layer=common.LAYER,
    outside=common.OUTSIDE,
    gguf="llama",
    gguf_rotates_pairs=True,
)
