"""Attention over a cached prefix as a Pallas kernel for TPUs (Mosaic).

One program per sequence, key/value head and tile of query rows walks the blocks of the cache in order, keeping its sums in
VMEM. Blocks past a sequence's length name its last block again, so that none of them is fetched, and compute nothing.
Lowered to Mosaic, never run on a TPU; the sizes below are not tuned.

Shape suffixes: b batch, k key/value heads, r query rows of one key/value head, s cache slots, x slots of one block,
y shares of the prefix (1 here), e head dim.

Source: FlashAttention (arXiv 2205.14135).
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

SLOTS = 512  # of a block
ROWS = 512  # of a tile, at most: enough products per byte of the cache, and about 5 MiB of VMEM with a block of logits
SUBLANES = 16  # rows are padded to a multiple: a bfloat16 tile


def attend(
    q_bkre: jax.Array, keys_bkse: jax.Array, values_bkse: jax.Array, length_b: jax.Array, *, scale: float, interpret: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Softmax attention over the first `length_b` slots, not yet divided.

    Args:
      q_bkre: queries.
      keys_bkse: the cache; fastest where the slots are a multiple of SLOTS.
      values_bkse: the cache.
      length_b: slots that count; 0 gives a sum of nothing, with a peak of -inf.
      scale: of the logits.
      interpret: run as plain JAX, on any device.

    Returns:
      sum exp(l - peak) v [b, k, 1, r, e], sum exp(l - peak) [b, k, 1, r] and peak = max l [b, k, 1, r] over a row's
      logits l, in float32 at least.
    """
    batch, kv_heads, rows, head_dim = q_bkre.shape
    tiles = pl.cdiv(rows, ROWS)
    tile = pl.cdiv(rows, tiles * SUBLANES) * SUBLANES
    size = math.gcd(keys_bkse.shape[2], SLOTS)
    wide = jnp.promote_types(q_bkre.dtype, jnp.float32)
    q_bkre = jnp.pad(q_bkre, ((0, 0), (0, 0), (0, tiles * tile - rows), (0, 0)))

    def rows_of(b, k, i, j, length_ref):
        return b, k, i, 0

    def slots_of(b, k, i, j, length_ref):
        last = lax.div(jnp.maximum(length_ref[b] - 1, 0), np.int32(size))
        return b, k, jnp.minimum(j, last), 0

    def shape(width: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*q_bkre.shape[:3], width), wide)

    mixed_bkre, total_bkr1, peak_bkr1 = pl.pallas_call(
        partial(_kernel, scale=scale),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, kv_heads, tiles, keys_bkse.shape[2] // size),
            in_specs=[
                pl.BlockSpec((None, None, tile, head_dim), rows_of),
                pl.BlockSpec((None, None, size, head_dim), slots_of),
                pl.BlockSpec((None, None, size, head_dim), slots_of),
            ],
            out_specs=[pl.BlockSpec((None, None, tile, width), rows_of) for width in (head_dim, 1, 1)],
        ),
        out_shape=[shape(head_dim), shape(1), shape(1)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="prefix_attention",
    )(length_b, q_bkre, keys_bkse, values_bkse)
    return mixed_bkre[:, :, None, :rows], total_bkr1[:, :, None, :rows, 0], peak_bkr1[:, :, None, :rows, 0]


def _kernel(length_ref, q_ref, k_ref, v_ref, mixed_ref, total_ref, peak_ref, *, scale):
    """One block of slots. The outputs stay in VMEM until the tile is done, and hold its sums so far."""
    length, index, size = length_ref[pl.program_id(0)], pl.program_id(3), k_ref.shape[0]

    @pl.when(index == 0)
    def _():
        mixed_ref[...] = jnp.zeros_like(mixed_ref)
        total_ref[...] = jnp.zeros_like(total_ref)
        peak_ref[...] = jnp.full_like(peak_ref, -jnp.inf)

    @pl.when(index * size < length)
    def _():
        wide = mixed_ref.dtype
        logits_rx = lax.dot_general(q_ref[...], k_ref[...], (((1,), (1,)), ((), ())), preferred_element_type=wide) * scale
        slots_rx = index * size + lax.broadcasted_iota(jnp.int32, logits_rx.shape, 1)
        logits_rx = jnp.where(slots_rx < length, logits_rx, -jnp.inf)
        before_r1 = peak_ref[...]
        peak_r1 = jnp.maximum(before_r1, jnp.max(logits_rx, axis=1, keepdims=True))  # finite: the first slot is seen
        weights_rx, kept_r1 = jnp.exp(logits_rx - peak_r1), jnp.exp(before_r1 - peak_r1)
        mixed_re = jnp.dot(weights_rx.astype(v_ref.dtype), v_ref[...], preferred_element_type=wide)
        mixed_ref[...] = mixed_ref[...] * kept_r1 + mixed_re
        total_ref[...] = total_ref[...] * kept_r1 + jnp.sum(weights_rx, axis=1, keepdims=True)
        peak_ref[...] = peak_r1
