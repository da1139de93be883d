"""Splash attention within packed sequences, for TPUs; the plain form is `packed_attention` "chunked".

It was compiled for v5e.

Shape suffixes: those of `packed_attention`.

Source: FlashAttention (arXiv 2205.14135).
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from treeflash_jax.models.packed_attention import PackedMask, on_each_device

TAKES = "multiples of 128 queries and keys, no windows and no sinks"
LANES = 128  # sides of blocks are multiples
BLOCK = 512  # queries or keys of a block, at most


def supports(q_bthe: jax.Array, k_bxke: jax.Array, is_plain: bool) -> bool:
    return is_plain and q_bthe.shape[1] % LANES == 0 and k_bxke.shape[1] % LANES == 0


def run(q_bthe: jax.Array, k_bxke: jax.Array, v_bxke: jax.Array, mask: PackedMask) -> jax.Array:
    """Runs the kernel, on a mesh for each device's own sequences and heads. A CPU interprets it, slowly."""

    def attend(*arrays):
        return lax.platform_dependent(*arrays, cpu=partial(_run, interpret=True), tpu=_run)

    return on_each_device(attend, q_bthe, k_bxke, v_bxke, mask)


def _run(q_bthe, k_bxke, v_bxke, mask, *, interpret=False):
    """Runs splash attention, whose backward pass is a kernel too."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

    size_t, size_x = (math.gcd(x.shape[1], BLOCK) for x in (q_bthe, k_bxke))
    sizes = splash.BlockSizes(
        block_q=size_t, block_kv=size_x, block_q_dkv=size_t, block_kv_dkv=size_x, block_q_dq=size_t, block_kv_dq=size_x
    )
    causal = masks.MultiHeadMask([masks.CausalMask((q_bthe.shape[1], k_bxke.shape[1]))] * q_bthe.shape[2])
    kernel = splash.make_splash_mha_single_device(causal, block_sizes=sizes, interpret=interpret)

    def attend(q_hte, k_kxe, v_kxe, mask):
        run = kernel
        if mask.rule is not None:
            info = MaskInfo(None, None, None, None, mask.packed_bt)
            run = splash.SplashAttentionKernel(info, info, info, **kernel.kwargs | {"mask_function": mask.rule})
        return run(q_hte, k_kxe, v_kxe, splash.SegmentIds(mask.segments_bt, mask.segments_bx))

    q_bhte, k_bkxe, v_bkxe = (jnp.swapaxes(x, 1, 2) for x in (q_bthe * q_bthe.shape[-1] ** -0.5, k_bxke, v_bxke))
    return jnp.swapaxes(jax.vmap(attend)(q_bhte, k_bkxe, v_bkxe, mask), 1, 2)
