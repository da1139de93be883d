"""Attention over a cached prefix as a Pallas kernel for TPUs (Mosaic).

One program per sequence, key/value head and tile of queries walks the blocks of the cache in order, keeping its sums in
VMEM. Blocks past a sequence's length name its last block again, so that none of them is fetched, and compute nothing.
Lowered to Mosaic, never run on a TPU; the sizes below are not tuned.

Shape suffixes: b batch, k key/value heads, q queries of one key/value head, s cache slots, x slots of one block,
y shares of the prefix (1 here), e head dim.

Source: FlashAttention (arXiv 2205.14135).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

SLOTS = 512  # per block
QUERIES = 512  # per tile, at most: enough products per byte of the cache, and about 5 MiB of VMEM with a block of logits
SUBLANES = 16  # queries are padded to a multiple: a bfloat16 tile


def attend(
    q_bkqe: jax.Array, keys_bkse: jax.Array, values_bkse: jax.Array, length_b: jax.Array, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the same as `attention_gpu.attend`, in one share and for any sizes; fastest if SLOTS divides the slots."""
    batch, kv_heads, queries, head_dim = q_bkqe.shape
    tiles = pl.cdiv(queries, QUERIES)
    tile = pl.cdiv(queries, tiles * SUBLANES) * SUBLANES
    size = math.gcd(keys_bkse.shape[2], SLOTS)
    wide = jnp.promote_types(q_bkqe.dtype, jnp.float32)
    q_bkqe = jnp.pad(q_bkqe, ((0, 0), (0, 0), (0, tiles * tile - queries), (0, 0)))

    def query_block(b, k, i, j, length_ref):
        return b, k, i, 0

    def slot_block(b, k, i, j, length_ref):
        last = lax.div(jnp.maximum(length_ref[b] - 1, 0), np.int32(size))
        return b, k, jnp.minimum(j, last), 0

    def shape(width: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*q_bkqe.shape[:3], width), wide)

    mixed_bkqe, total_bkq1, peak_bkq1 = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, kv_heads, tiles, keys_bkse.shape[2] // size),
            in_specs=[
                pl.BlockSpec((None, None, tile, head_dim), query_block),
                pl.BlockSpec((None, None, size, head_dim), slot_block),
                pl.BlockSpec((None, None, size, head_dim), slot_block),
            ],
            out_specs=[pl.BlockSpec((None, None, tile, width), query_block) for width in (head_dim, 1, 1)],
        ),
        out_shape=[shape(head_dim), shape(1), shape(1)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="prefix_attention",
    )(length_b, q_bkqe, keys_bkse, values_bkse)
    return mixed_bkqe[:, :, None, :queries], total_bkq1[:, :, None, :queries, 0], peak_bkq1[:, :, None, :queries, 0]


def _kernel(length_ref, q_ref, k_ref, v_ref, mixed_ref, total_ref, peak_ref):
    """Attends to one block of slots. The outputs stay in VMEM until the tile is done, and hold its sums so far."""
    length, index, size = length_ref[pl.program_id(0)], pl.program_id(3), k_ref.shape[0]

    @pl.when(index == 0)
    def _():
        mixed_ref[...] = jnp.zeros_like(mixed_ref)
        total_ref[...] = jnp.zeros_like(total_ref)
        peak_ref[...] = jnp.full_like(peak_ref, -jnp.inf)

    @pl.when(index * size < length)
    def _():
        wide = mixed_ref.dtype
        logits_qx = lax.dot_general(q_ref[...], k_ref[...], (((1,), (1,)), ((), ())), preferred_element_type=wide)
        slots_qx = index * size + lax.broadcasted_iota(jnp.int32, logits_qx.shape, 1)
        logits_qx = jnp.where(slots_qx < length, logits_qx * q_ref.shape[1] ** -0.5, -jnp.inf)
        before_q1 = peak_ref[...]
        peak_q1 = jnp.maximum(before_q1, jnp.max(logits_qx, axis=1, keepdims=True))  # finite: the first slot is seen
        weights_qx, kept_q1 = jnp.exp(logits_qx - peak_q1), jnp.exp(before_q1 - peak_q1)
        mixed_qe = jnp.dot(weights_qx.astype(v_ref.dtype), v_ref[...], preferred_element_type=wide)
        mixed_ref[...] = mixed_ref[...] * kept_q1 + mixed_qe
        total_ref[...] = total_ref[...] * kept_q1 + jnp.sum(weights_qx, axis=1, keepdims=True)
        peak_ref[...] = peak_q1
