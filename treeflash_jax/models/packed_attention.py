"""Attention within packed sequences, in training; `attention` is that of inference, over a cached prefix.

"chunked" is the plain form. Other names are those of kernels, which write no logits to memory; what a kernel does not take
runs as by "chunked".

Shape suffixes: b sequences, t queries, x keys, c queries of a chunk, h query heads, k key/value heads, e head dim.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from treeflash_jax.core import sharding
from treeflash_jax.models import kernels
from treeflash_jax.models.attention import Operands, attend_plainly

CHUNK = 256  # queries
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
      mask: a rule, or an array [b, t, x]. Every query must see some key.
      sinks_h: as in `attention.tree_attention`.
      implementation: a name in IMPLEMENTATIONS.
    """
    is_rule = isinstance(mask, PackedMask)
    if run := find_kernel(implementation, q_bthe, k_bxke, is_plain=is_rule and sinks_h is None):
        return run(q_bthe, k_bxke, v_bxke, mask)
    mask = mask.dense() if is_rule else mask
    return _chunked(Operands(q_bthe, k_bxke, v_bxke, mask, sinks_h, None, None, None))


def find_kernel(
    implementation: str, q_bthe: jax.Array, k_bxke: jax.Array, is_plain: bool = True
) -> Callable[..., jax.Array] | None:
    """Returns a function of queries, keys, values and `PackedMask`; None for "chunked".

    Args:
      is_plain: whether the layer has neither sinks nor a window.
    """
    if implementation == "chunked":
        return None
    return kernels.find("packed attention", q_bthe, k_bxke, is_plain, name=implementation)


def on_each_device(
    run: Callable[..., jax.Array], q_bthe: jax.Array, k_bxke: jax.Array, v_bxke: jax.Array, mask: PackedMask
) -> jax.Array:
    """Runs a kernel on every device of a mesh, for its own sequences and heads."""
    heads, batch = (("batch", None, "kv_heads", None), k_bxke.shape), (("batch",), q_bthe.shape[:1])
    return sharding.over_mesh(run, (q_bthe, k_bxke, v_bxke, mask), (heads, heads, heads, batch))


def _chunked(operands: Operands) -> jax.Array:
    """Runs `attend_plainly` over CHUNK queries at a time, recomputed in backward passes, so that memory is bounded."""
    q_bthe, mask_btu = operands.q_bthe, operands.mask_btu
    if q_bthe.shape[1] <= CHUNK or q_bthe.shape[1] % CHUNK:
        return attend_plainly(operands)

    @jax.checkpoint
    def attend(chunk):
        q_bche, mask_bcu = chunk
        return attend_plainly(operands._replace(q_bthe=q_bche, mask_btu=mask_bcu))

    def split(x):
        return jnp.moveaxis(x.reshape(x.shape[0], -1, CHUNK, *x.shape[2:]), 1, 0)

    return jnp.moveaxis(lax.map(attend, (split(q_bthe), split(mask_btu))), 0, 1).reshape(q_bthe.shape)


IMPLEMENTATIONS = ("chunked", *kernels.KERNELS["packed attention"])
