"""Attention within packed sequences, for training. `attention` is for inference, over a cached prefix.

"chunked" is the plain variant. "splash" (splash attention, for TPUs) and "cudnn" (for NVIDIA GPUs) are kernels, which write
no logits to memory; "chunked" runs for operands that they do not take. Splash attention was compiled for v5e, but never run
there.

Shape suffixes: b sequences, t queries, x keys, c queries of a chunk, h query heads, k key/value heads, e head dim.

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
from treeflash_jax.core.error_text import warn
from treeflash_jax.models.attention import Operands, attend_plainly

IMPLEMENTATIONS = ("chunked", "splash", "cudnn")
CHUNK = 256  # queries computed at a time
LANES = 128  # sides of splash attention's blocks are multiples of this
BLOCK = 512  # largest side of these blocks
TAKES = {
    "splash": "multiples of 128 queries and keys",
    "cudnn": "bfloat16 or float16, heads of up to 128 that 8 divides, and even numbers of queries and keys",
}
BLOCK_BITS = 12  # bits of an int32 for the index of a block; the others are for the end of its context
MAX_BLOCKS = 2**BLOCK_BITS
MAX_CONTEXT = 2 ** (31 - BLOCK_BITS)


@dataclass(frozen=True)
class BlockMask:
    """Mask over `context` keys and then blocks of `keys` keys each. It is computed from one integer per query."""

    context: int
    keys: int

    @staticmethod
    def pack(ends: jax.Array, blocks: jax.Array) -> jax.Array:
        """Packs two numbers per query: how many of the first context keys the query sees, and the index of its block."""
        return ends << BLOCK_BITS | blocks

    def __call__(self, query: jax.Array, key: jax.Array) -> jax.Array:
        first = self.context + (query & (MAX_BLOCKS - 1)) * self.keys
        return (key < query >> BLOCK_BITS) | ((key >= first) & (key < first + self.keys))


@struct.dataclass
class PackedMask:
    """Mask of packed sequences, without an array [b, t, x].

    Attributes:
      segments_bt: documents of the queries; a query sees only keys of its own document.
      segments_bx: documents of the keys.
      packed_bt: integers of `BlockMask.pack`; None without blocks.
      block_mask: mask within a document; None: causal.
    """

    segments_bt: jax.Array
    segments_bx: jax.Array
    packed_bt: jax.Array | None = None
    block_mask: BlockMask | None = struct.field(pytree_node=False, default=None)

    def dense(self) -> jax.Array:
        """Returns the mask as an array [b, t, x]."""
        same_btx = self.segments_bt[:, :, None] == self.segments_bx[:, None]
        if self.block_mask is None:
            return same_btx & jnp.tri(*same_btx.shape[1:], dtype=bool)
        return same_btx & self.block_mask(self.packed_bt[:, :, None], jnp.arange(same_btx.shape[2]))


def packed_attention(
    q_bthe: jax.Array,
    k_bxke: jax.Array,
    v_bxke: jax.Array,
    mask: PackedMask | jax.Array,
    *,
    sinks_h: jax.Array | None = None,
    implementation: str = "chunked",
) -> jax.Array:
    """Computes softmax(q K^T / sqrt(e)) V, [b, t, h, e] in the dtype of the queries.

    Args:
      mask: `PackedMask`, or an array [b, t, x] if the layer has a window. Every query must see at least one key.
      sinks_h: as in `attention.tree_attention`. Kernels take neither sinks nor windows.
      implementation: a name in IMPLEMENTATIONS.
    """
    if isinstance(mask, PackedMask):
        if sinks_h is None and supports(implementation, q_bthe, k_bxke):
            return run_kernel(implementation, q_bthe, k_bxke, v_bxke, mask)
        mask = mask.dense()
    return _chunked(Operands(q_bthe, k_bxke, v_bxke, mask, sinks_h, None, None, None))


def supports(name: str, q_bthe: jax.Array, k_bxke: jax.Array) -> bool:
    """Returns whether an implementation is a kernel that takes these sizes and dtypes. Warns if it takes others."""
    sizes, head_dim = (q_bthe.shape[1], k_bxke.shape[1]), q_bthe.shape[3]
    if name == "chunked":
        return False
    if name == "splash":
        is_taken = all(size % LANES == 0 for size in sizes)
    else:
        is_narrow = q_bthe.dtype in (jnp.bfloat16, jnp.float16)
        is_taken = is_narrow and head_dim % 8 == 0 and head_dim <= 128 and all(size % 2 == 0 for size in sizes)
    if not is_taken:
        warn(f"attention {name!r} takes {TAKES[name]}; 'chunked' runs for anything else")
    return is_taken


def run_kernel(name: str, q_bthe: jax.Array, k_bxke: jax.Array, v_bxke: jax.Array, mask: PackedMask) -> jax.Array:
    """Runs a kernel; on a mesh, for each device's sequences and heads. A CPU interprets "splash", which is slow."""
    heads, batch = (("batch", None, "kv_heads", None), k_bxke.shape), (("batch",), q_bthe.shape[:1])
    variants = {"cpu": partial(_splash, interpret=True), "tpu": _splash}
    run = _cudnn if name == "cudnn" else partial(lax.platform_dependent, **variants)
    return sharding.over_mesh(run, (q_bthe, k_bxke, v_bxke, mask), (heads, heads, heads, batch))


def _chunked(operands: Operands) -> jax.Array:
    """Runs `attend_plainly` over CHUNK queries at a time, and again in backward passes, which bounds memory."""
    q_bthe, mask_btu = operands.q_bthe, operands.mask_btu
    if q_bthe.shape[1] <= CHUNK or q_bthe.shape[1] % CHUNK:
        return attend_plainly(operands)

    @jax.checkpoint
    def attend(chunk: tuple[jax.Array, jax.Array]):
        q_bche, mask_bcu = chunk
        return attend_plainly(operands._replace(q_bthe=q_bche, mask_btu=mask_bcu))

    def split(x: jax.Array):
        return jnp.moveaxis(x.reshape(x.shape[0], -1, CHUNK, *x.shape[2:]), 1, 0)

    return jnp.moveaxis(lax.map(attend, (split(q_bthe), split(mask_btu))), 0, 1).reshape(q_bthe.shape)


def _cudnn(q_bthe: jax.Array, k_bxke: jax.Array, v_bxke: jax.Array, mask: PackedMask):
    mask_b1tx, scale = mask.dense()[:, None], q_bthe.shape[-1] ** -0.5
    return jax.nn.dot_product_attention(q_bthe, k_bxke, v_bxke, mask=mask_b1tx, scale=scale, implementation="cudnn")


def _splash(q_bthe: jax.Array, k_bxke: jax.Array, v_bxke: jax.Array, mask: PackedMask, *, interpret: bool = False):
    """Runs splash attention. Its backward pass is a kernel, too."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

    size_t = math.gcd(q_bthe.shape[1], BLOCK)
    size_x = math.gcd(k_bxke.shape[1], BLOCK)
    sizes = splash.BlockSizes(
        block_q=size_t, block_kv=size_x, block_q_dkv=size_t, block_kv_dkv=size_x, block_q_dq=size_t, block_kv_dq=size_x
    )
    causal = masks.MultiHeadMask([masks.CausalMask((q_bthe.shape[1], k_bxke.shape[1]))] * q_bthe.shape[2])
    kernel = splash.make_splash_mha_single_device(causal, block_sizes=sizes, interpret=interpret)

    def attend(q_hte: jax.Array, k_kxe: jax.Array, v_kxe: jax.Array, mask: PackedMask):
        run = kernel
        if mask.block_mask is not None:
            info = MaskInfo(None, None, None, None, mask.packed_bt)
            run = splash.SplashAttentionKernel(info, info, info, **kernel.kwargs | {"mask_function": mask.block_mask})
        return run(q_hte, k_kxe, v_kxe, splash.SegmentIds(mask.segments_bt, mask.segments_bx))

    q_bhte = jnp.swapaxes(q_bthe * q_bthe.shape[-1] ** -0.5, 1, 2)
    k_bkxe = jnp.swapaxes(k_bxke, 1, 2)
    v_bkxe = jnp.swapaxes(v_bxke, 1, 2)
    return jnp.swapaxes(jax.vmap(attend)(q_bhte, k_bkxe, v_bkxe, mask), 1, 2)
