"""Attention within packed sequences (in training), by splash attention on TPUs and by cuDNN on GPUs.

Neither writes logits to memory. The plain forms are "chunked" of `models.attention`, and `block_attention` of training.
Splash attention was compiled for v5e, never run there; a CPU interprets it, slowly.

Shape suffixes: b sequences, t queries, x keys, h query heads, k key/value heads, e head dim.

Source: FlashAttention (arXiv 2205.14135).
"""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from treeflash_jax.core import sharding

KINDS = ("splash", "cudnn")
LANES = 128  # sides of splash attention's blocks are multiples
BLOCK = 512  # queries or keys of such a block, at most
BLOCK_BITS = 12  # of an int32 that holds the index of a block; the others hold the end of its context
MAX_BLOCKS = 2**BLOCK_BITS
MAX_CONTEXT = 2 ** (31 - BLOCK_BITS)


@dataclass(frozen=True)
class BlockRule:
    """Mask over `context` keys followed by blocks of `keys` keys each, computed from one integer per query."""

    context: int
    keys: int

    @staticmethod
    def pack(ends: jax.Array, blocks: jax.Array) -> jax.Array:
        """Packs, per query, the number of the first context keys that it sees and the index of its block."""
        return ends << BLOCK_BITS | blocks

    def __call__(self, query: jax.Array, key: jax.Array) -> jax.Array:
        first = self.context + (query & (MAX_BLOCKS - 1)) * self.keys
        return (key < query >> BLOCK_BITS) | ((key >= first) & (key < first + self.keys))


@struct.dataclass
class PackedMask:
    """Mask of packed sequences as a rule instead of an array [b, t, x].

    Attributes:
      segments_bt: documents of the queries; a query sees only keys of its own document.
      segments_bx: documents of the keys.
      packed_bt: integers of `BlockRule.pack`; None without a rule.
      rule: mask within a document; None: causal.
    """

    segments_bt: jax.Array
    segments_bx: jax.Array
    packed_bt: jax.Array | None = None
    rule: BlockRule | None = struct.field(pytree_node=False, default=None)

    def dense(self) -> jax.Array:
        """Returns the mask as an array [b, t, x]."""
        same_btx = self.segments_bt[:, :, None] == self.segments_bx[:, None]
        if self.rule is None:
            return same_btx & jnp.tri(*same_btx.shape[1:], dtype=bool)
        return same_btx & self.rule(self.packed_bt[:, :, None], jnp.arange(same_btx.shape[2]))


def supports(kind: str, q_bthe: jax.Array, k_bxke: jax.Array) -> bool:
    """Returns whether the kernel takes these sizes and dtypes; False for any other implementation."""
    sizes, head_dim = (q_bthe.shape[1], k_bxke.shape[1]), q_bthe.shape[3]
    if kind == "splash":
        return all(size % LANES == 0 for size in sizes)
    narrow = q_bthe.dtype in (jnp.bfloat16, jnp.float16)
    return kind == "cudnn" and narrow and head_dim % 8 == 0 and head_dim <= 128 and all(size % 2 == 0 for size in sizes)


def attend(kind: str, q_bthe: jax.Array, k_bxke: jax.Array, v_bxke: jax.Array, mask: PackedMask) -> jax.Array:
    """Runs the kernel, on a mesh for each device's own sequences and heads. Every query must see some key."""
    heads, batch = (("batch", None, "kv_heads", None), k_bxke.shape), (("batch",), q_bthe.shape[:1])

    def run(*arrays):
        if kind == "cudnn":
            return _cudnn(*arrays)
        return lax.platform_dependent(*arrays, cpu=partial(_splash, interpret=True), tpu=_splash)

    return sharding.over_mesh(run, (q_bthe, k_bxke, v_bxke, mask), (heads, heads, heads, batch))


def _cudnn(q_bthe, k_bxke, v_bxke, mask):
    mask_b1tx, scale = mask.dense()[:, None], q_bthe.shape[-1] ** -0.5
    return jax.nn.dot_product_attention(q_bthe, k_bxke, v_bxke, mask=mask_b1tx, scale=scale, implementation="cudnn")


def _splash(q_bthe, k_bxke, v_bxke, mask, *, interpret=False):
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
