"""Attention over a cached prefix, as a Pallas kernel for GPUs (Triton).

The plain variant is "streamed" in `models.attention`. There is one program per sequence and key/value head, tile of queries
and share of the prefix. A sequence's blocks of slots are divided evenly among its shares, whatever its length, so a batch
of one fills the device. The caller merges the shares. No block past a sequence's length is read.

Pallas' Triton lowering works on every NVIDIA GPU since Ampere. jax 0.12 deprecates it in favour of Mosaic
(`attention_mosaic`). The sizes below are not tuned.

Shape suffixes: b batch, k key/value heads, q queries of one key/value head, n layers of an array, s cache slots, x slots of
one block, y shares of the prefix, e head dim.

Source: Flash-Decoding (Dao et al., 2023) over FlashAttention (arXiv 2205.14135).
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from treeflash_jax.core.dtypes import at_least_float32
from treeflash_jax.models.attention import Operands, divide, group_queries, logits, on_each_device
from treeflash_jax.models.backend import products
from treeflash_jax.models.kv_cache import LayerKV

SLOTS = 64  # slots per block; a smaller power of two if this does not divide the capacity
QUERIES = 64  # most queries of a tile
PROGRAMS = 256  # intended number of programs: about two for each multiprocessor of a large GPU
SHARE = 256  # fewest slots of a full cache per share
LEAST = 16  # smallest side of a matrix product
TAKES = "heads of a power of two and at least 16, and caches of a multiple of 16 slots"


def supports(operands: Operands) -> bool:
    head_dim, slots = operands.q_bthe.shape[-1], operands.prefix.num_slots
    return head_dim.bit_count() == 1 and min(head_dim, math.gcd(slots, SLOTS)) >= LEAST


def run(operands: Operands) -> jax.Array:
    """Runs the kernel over the prefix and merges its shares with the softmax over the new positions.

    A CPU interprets it, slowly.
    """

    def attend(operands: Operands) -> jax.Array:
        q_bthe, k_buke, v_buke, mask_btu, sinks_h, _, prefix, length_b = operands
        q_bkqe = group_queries(q_bthe, k_buke.shape[2])
        new_bkqu = logits(q_bkqe, jnp.swapaxes(k_buke, 1, 2), mask_btu)
        variants = {"cpu": partial(_attend, interpret=True), "cuda": _attend}
        mixed_bkyqe, total_bkyq, peak_bkyq = lax.platform_dependent(q_bkqe, prefix, length_b, **variants)
        peak_bkq = jnp.maximum(jnp.max(new_bkqu, axis=-1), jnp.max(peak_bkyq, axis=2))
        new_bkqu, kept_bkyq = jnp.exp(new_bkqu - peak_bkq[..., None]), jnp.exp(peak_bkyq - peak_bkq[:, :, None])
        mixed_bkqe, total_bkq = products.attention_sums(new_bkqu, jnp.swapaxes(v_buke, 1, 2))
        total_bkq += jnp.sum(total_bkyq * kept_bkyq, axis=2)
        mixed_bkqe += jnp.sum(mixed_bkyqe * kept_bkyq[..., None], axis=2)
        return divide(mixed_bkqe, total_bkq[..., None], peak_bkq[..., None], sinks_h, q_bthe)

    return on_each_device(attend, operands)


def _attend(q_bkqe: jax.Array, prefix: LayerKV, length_b: jax.Array, interpret: bool = False):
    """Returns sum exp(l - peak) v [b, k, y, q, e], sum exp(l - peak) [b, k, y, q] and peak = max l [b, k, y, q].

    Each is over a share of a query's logits l, in float32 at least. An empty share gives sums of 0 and a peak of -inf.
    """
    batch, kv_heads, queries, head_dim = q_bkqe.shape
    _, layers, _, slots, _ = prefix.keys_bnkse.shape
    size = math.gcd(slots, SLOTS)
    tile = min(QUERIES, max(LEAST, pl.next_power_of_2(queries)))
    tiles = pl.cdiv(queries, tile)
    shares = max(1, min(PROGRAMS // (batch * kv_heads * tiles), slots // SHARE))
    wide = at_least_float32(q_bkqe.dtype)
    q_bkqe = jnp.pad(q_bkqe, ((0, 0), (0, 0), (0, tiles * tile - queries), (0, 0)))

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, kv_heads, shares, tiles * tile, *sizes), wide)

    query_spec = pl.BlockSpec((None, None, None, tile), lambda z, y, i: (z // kv_heads, z % kv_heads, y, i))
    slot_spec = pl.BlockSpec((None, layers, None, slots, head_dim), lambda z, y, i: (z // kv_heads, 0, z % kv_heads, 0, 0))
    mixed_bkyqe, total_bkyq, peak_bkyq = pl.pallas_call(
        partial(_kernel, size=size, shares=shares),
        grid=(batch * kv_heads, shares, tiles),
        in_specs=[
            pl.BlockSpec((None,), lambda z, y, i: (z // kv_heads,)),
            pl.BlockSpec((None,), lambda z, y, i: (0,)),
            pl.BlockSpec((None, None, tile, head_dim), lambda z, y, i: (z // kv_heads, z % kv_heads, i, 0)),
            slot_spec,
            slot_spec,
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, tile, head_dim), lambda z, y, i: (z // kv_heads, z % kv_heads, y, i, 0)),
            query_spec,
            query_spec,
        ],
        out_shape=[shape(head_dim), shape(), shape()],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="prefix_attention",
    )(length_b, prefix.layer[None], q_bkqe, prefix.keys_bnkse, prefix.values_bnkse)
    return mixed_bkyqe[:, :, :, :queries], total_bkyq[..., :queries], peak_bkyq[..., :queries]


def _kernel(length_ref, layer_ref, q_ref, k_ref, v_ref, mixed_ref, total_ref, peak_ref, *, size, shares):
    """Attends to a share of a sequence's blocks."""
    length, layer, wide = length_ref[...], layer_ref[...], mixed_ref.dtype
    blocks = lax.div(length + (size - 1), np.int32(size))
    each = lax.div(blocks + (shares - 1), np.int32(shares))
    first = pl.program_id(1) * each
    q_qe = q_ref[...]

    def step(index, carry):
        mixed_qe, total_q, before_q = carry
        at = pl.ds(index * size, size)
        slots_x = index * size + jnp.arange(size)
        logits_qx = plgpu.dot(q_qe, k_ref[layer, at, :].T) * q_qe.shape[1] ** -0.5
        logits_qx = jnp.where(slots_x[None] < length, logits_qx, -jnp.inf)
        peak_q = jnp.maximum(before_q, jnp.max(logits_qx, axis=1))  # finite, because the first slot is seen
        weights_qx, kept_q = jnp.exp(logits_qx - peak_q[:, None]), jnp.exp(before_q - peak_q)
        added_qe = plgpu.dot(weights_qx.astype(v_ref.dtype), v_ref[layer, at, :])
        return mixed_qe * kept_q[:, None] + added_qe, total_q * kept_q + jnp.sum(weights_qx, axis=1), peak_q

    nothing = jnp.zeros(q_qe.shape, wide), jnp.zeros(q_qe.shape[:1], wide), jnp.full(q_qe.shape[:1], -jnp.inf, wide)
    mixed_ref[...], total_ref[...], peak_ref[...] = lax.fori_loop(first, jnp.minimum(first + each, blocks), step, nothing)
