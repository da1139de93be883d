"""Attention within packed sequences by cuDNN, for NVIDIA GPUs since Ampere; the plain form is `packed_attention` "chunked".

Shape suffixes: those of `packed_attention`.
"""

import jax
import jax.numpy as jnp

from treeflash_jax.models.packed_attention import PackedMask, on_each_device

TAKES = "bfloat16 or float16, heads of up to 128 that 8 divides, even numbers of queries and keys, no windows and no sinks"


def supports(q_bthe: jax.Array, k_bxke: jax.Array, is_plain: bool) -> bool:
    head_dim, is_narrow = q_bthe.shape[3], q_bthe.dtype in (jnp.bfloat16, jnp.float16)
    is_even = q_bthe.shape[1] % 2 == 0 and k_bxke.shape[1] % 2 == 0
    return is_plain and is_narrow and head_dim % 8 == 0 and head_dim <= 128 and is_even


def run(q_bthe: jax.Array, k_bxke: jax.Array, v_bxke: jax.Array, mask: PackedMask) -> jax.Array:
    """Runs the kernel, on a mesh for each device's own sequences and heads."""
    return on_each_device(_run, q_bthe, k_bxke, v_bxke, mask)


def _run(q_bthe, k_bxke, v_bxke, mask):
    mask_b1tx, scale = mask.dense()[:, None], q_bthe.shape[-1] ** -0.5
    return jax.nn.dot_product_attention(q_bthe, k_bxke, v_bxke, mask=mask_b1tx, scale=scale, implementation="cudnn")
