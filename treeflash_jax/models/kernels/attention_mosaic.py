"""Attention over a cached prefix and the new positions in one Pallas kernel for Hopper GPUs (Mosaic).

The plain variant is "xla" in `models.attention`. The kernel can also norm and rotate queries and keys as the projections
produce them. As separate operations, these steps take longer than the attention. The kernel was compiled for an H200, and
its sizes are not tuned.

There is one program per sequence, key/value head, tile of queries and share of the keys. The last share is the new
positions. The other shares divide a sequence's blocks of slots evenly, whatever its length, so a batch of one fills the
device. No block past a sequence's length is read. XLA merges the shares.

Shape suffixes: b batch, t new positions (queries), u new positions (keys), s cache slots, h query heads, k key/value heads,
j heads of one key/value head in an array of new positions, z tiles of heads, i tiles of positions, y shares, r rows of a
tile (a head and a position each), x keys of one block, e head dim, n anything.

Source: Flash-Decoding (Dao et al., 2023) over FlashAttention-3 (arXiv 2407.08608).
"""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from treeflash_jax.models.attention import Operands, on_each_device
from treeflash_jax.models.kv_cache import LayerKV

TILE = 64  # rows of a matrix product on Hopper; also keys of a block
HEADS = 8  # most heads of a tile
PROGRAMS = 132  # intended number of programs: one for each multiprocessor
SHARE = 256  # fewest slots of a full cache per share
STAGES = 3  # blocks of keys and values in shared memory
HIDDEN = -1e30  # logit of a hidden key: finite, so that a row is not NaN if all keys of its first block are hidden
ROW = plgpu.Layout.WGMMA.reduce(1)  # one number for each row of a tile
TAKES = "bfloat16 or float16, heads of 64 or 128, caches of a multiple of 8 slots, and no sinks"
SoftmaxSums = tuple[jax.Array, jax.Array, jax.Array]  # sum exp(l - peak) v [r, e], sum exp(l - peak) [r], peak = max l [r]


class _New(NamedTuple):
    """New positions: arrays [b, t or u, k, j, e] of queries, keys and values, which may be one array.

    Attributes:
      group: number of query heads, which are the first of the j heads.
      key, value: indices among the j heads.
      q_turns_bte, k_turns_bue: cosines of the rotation, followed by its sines.
      scales_je: scales of the RMS norm of query heads (first) and key (`key`).
      eps: number added to the mean square before its root; None: no norm.
    """

    q_btkje: jax.Array
    k_bukje: jax.Array
    v_bukje: jax.Array
    group: int
    key: int
    value: int
    q_turns_bte: jax.Array
    k_turns_bue: jax.Array
    scales_je: jax.Array
    eps: float | None


def supports(operands: Operands) -> bool:
    return operands.sinks_h is None and supports_cache(operands.prefix)


def supports_cache(prefix: LayerKV) -> bool:
    is_narrow = prefix.keys_bnkse.dtype in (jnp.bfloat16, jnp.float16)
    return is_narrow and prefix.keys_bnkse.shape[-1] in (64, 128) and prefix.num_slots % 8 == 0


def run(operands: Operands) -> jax.Array:
    """Runs the kernel. A CPU interprets it, slowly."""
    return on_each_device(_run, operands)


def _run(operands: Operands) -> jax.Array:
    q_bthe, k_buke, v_buke, mask_btu, _, _, prefix, length_b = operands
    batch, queries, _, head_dim = q_bthe.shape
    q_btkje = q_bthe.reshape(batch, queries, k_buke.shape[2], -1, head_dim)
    unturned_e = np.repeat(np.float32([1, 0]), head_dim // 2)
    turns = [jnp.broadcast_to(unturned_e, (batch, count, head_dim)) for count in (queries, k_buke.shape[1])]
    arrays = q_btkje, k_buke[:, :, :, None], v_buke[:, :, :, None]
    new = _New(*arrays, q_btkje.shape[3], 0, 0, *turns, scales_je=jnp.ones((1, head_dim), jnp.float32), eps=None)
    mixed_btkje, _ = _attend(new, mask_btu, prefix, length_b)
    return mixed_btkje.reshape(q_bthe.shape).astype(q_bthe.dtype)


def attend_raw(
    qkv_btkje: jax.Array,
    turns_bte: jax.Array,
    scales_je: jax.Array | None,
    mask_btt: jax.Array,
    prefix: LayerKV,
    length_b: jax.Array,
    *,
    eps: float,
) -> tuple[jax.Array, jax.Array]:
    """Norms and rotates new positions, and attends like `run`.

    Returns attention [b, t, k, j, e] of the query heads, and normed and rotated keys [b, t, k, 1, e].

    Args:
      qkv_btkje: query heads, key and value of each key/value head, as projected.
      turns_bte: cosines of the rotation, followed by its sines.
      scales_je: scales of the RMS norm of query heads and key, and another that is not read; None: no norm.
      eps: number added to the mean square before its root.
    """
    group = qkv_btkje.shape[3] - 2
    norm = {"scales_je": scales_je, "eps": eps}
    if scales_je is None:
        norm = {"scales_je": jnp.ones(qkv_btkje.shape[3:], jnp.float32), "eps": None}
    new = _New(qkv_btkje, qkv_btkje, qkv_btkje, group, group, group + 1, turns_bte, turns_bte, **norm)
    return _attend(new, mask_btt, prefix, length_b)


def _attend(new: _New, mask_btu: jax.Array, prefix: LayerKV, length_b: jax.Array) -> tuple[jax.Array, jax.Array]:
    (batch, queries, kv_heads, _, head_dim), keys = new.q_btkje.shape, new.k_bukje.shape[1]
    dtype, slots = prefix.keys_bnkse.dtype, prefix.num_slots
    arrays = [_copyable(x.astype(dtype)) for x in new[:3]]
    heads = min(HEADS, pl.next_power_of_2(new.group))
    span = TILE // heads
    head_tiles, tiles = pl.cdiv(new.group, heads), pl.cdiv(queries, span)
    shares = max(1, min(PROGRAMS // (batch * kv_heads * head_tiles * tiles), slots // SHARE))
    grid = batch, kv_heads, head_tiles, tiles, shares + 1
    hidden_btu = jnp.pad(jnp.where(mask_btu, 0.0, HIDDEN), ((0, 0), (0, 0), (0, -keys % TILE)), constant_values=HIDDEN)
    tables = _tiled(hidden_btu, span), _tiled(new.q_turns_bte, span), _tiled(new.k_turns_bue, TILE)
    wide = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    kernel = plgpu.kernel(
        partial(_kernel, group=new.group, heads=heads, key=new.key, value=new.value, eps=new.eps),
        grid=grid,
        grid_names=("b", "k", "z", "i", "y"),
        out_type=[
            wide((*grid, TILE, head_dim)),
            wide((*grid, TILE)),
            wide((*grid, TILE)),
            jax.ShapeDtypeStruct((batch, arrays[1].shape[1], kv_heads, head_dim), dtype),
        ],
        scratch_types=[
            plgpu.SMEM((TILE, head_dim), dtype),
            plgpu.SMEM((TILE, TILE), dtype),
            plgpu.Barrier(num_arrivals=heads),
        ],
        interpret=interpreter(),
        kernel_name="tree_attention",
    )
    stacks = prefix.keys_bnkse, prefix.values_bnkse
    *sums, keys_buke = kernel(length_b, prefix.layer[None], *arrays, *stacks, *tables, new.scales_je)
    mixed_bkzijte = _merge_shares(*sums).astype(dtype).reshape(*grid[:-1], heads, span, head_dim)
    mixed_btkje = mixed_bkzijte.transpose(0, 3, 5, 1, 2, 4, 6).reshape(batch, tiles * span, kv_heads, -1, head_dim)
    return mixed_btkje[:, :queries, :, : new.group], keys_buke[:, :keys, :, None]


def interpreter() -> Any:
    """Returns the interpreter's parameters if the program is for a CPU: the ambient mesh's devices, or the default one."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if device is None else device.platform
    return plgpu.InterpretGPUParams() if platform == "cpu" else None


def _copyable(x_bnkje: jax.Array) -> jax.Array:
    """Pads positions to a multiple of 8 if there are more than 8, because the hardware copies tiles of 8 positions."""
    padding = -x_bnkje.shape[1] % 8 if x_bnkje.shape[1] > 8 else 0
    return jnp.pad(x_bnkje, ((0, 0), (0, padding), (0, 0), (0, 0), (0, 0)))


def _tiled(x_btn: jax.Array, span: int) -> jax.Array:
    """Returns the rows of each tile of `span` positions, [b, i, r, n]. Each position is repeated for each head."""
    batch, positions, width = x_btn.shape
    x_btn = jnp.pad(x_btn.astype(jnp.float32), ((0, 0), (0, -positions % span), (0, 0)))
    return jnp.tile(x_btn.reshape(batch, -1, span, width), (1, 1, TILE // span, 1))


def _merge_shares(mixed_bkziyre: jax.Array, total_bkziyr: jax.Array, peak_bkziyr: jax.Array) -> jax.Array:
    """Returns attention [b, k, z, i, r, e]. Adds up shares one by one, because XLA launches each reduction separately."""
    shares = range(peak_bkziyr.shape[4])
    peak_bkzir = reduce(jnp.maximum, [peak_bkziyr[:, :, :, :, y] for y in shares])
    kept = [jnp.exp(peak_bkziyr[:, :, :, :, y] - peak_bkzir) for y in shares]
    mixed_bkzire = sum(mixed_bkziyre[:, :, :, :, y] * kept[y][..., None] for y in shares)
    total_bkzir = sum(total_bkziyr[:, :, :, :, y] * kept[y] for y in shares)
    return mixed_bkzire / total_bkzir[..., None]


def _kernel(
    length_ref, layer_ref, q_ref, k_ref, v_ref, prefix_k_ref, prefix_v_ref, hidden_ref, q_turns_ref, k_turns_ref,
    scales_ref, mixed_ref, total_ref, peak_ref, new_keys_ref, q_smem, weights_smem, barrier, *,
    group, heads, key, value, eps
):  # fmt: skip
    """Attends from a tile of queries to a share of the keys."""
    b, k, z, i, y = at = tuple(lax.axis_index(name) for name in "bkziy")
    span, num_shares = TILE // heads, mixed_ref.shape[4] - 1
    for j in range(heads):
        head = jnp.minimum(z * heads + j, group - 1)  # rows past the last head repeat the last head
        queries = q_ref.at[b, pl.ds(i * span, span), k, head]
        plgpu.copy_gmem_to_smem(queries, q_smem.at[pl.ds(j * span, span)], barrier)
    plgpu.barrier_wait(barrier)
    _norm_and_rotate(q_smem, q_turns_ref.at[b, i], scales_ref.at[0], eps)

    def attend(step: Callable, keys_ref, values_ref, first, count) -> None:
        """Adds up `count` blocks, starting at `first`, and writes their sums."""
        block = plgpu.BlockSpec((TILE, q_smem.shape[1]), lambda index: (first + index, 0))
        nothing = _nothing(*q_smem.shape)
        run = plgpu.emit_pipeline(
            step, grid=(count,), in_specs=[block, block], max_concurrent_steps=STAGES, init_carry=nothing
        )
        mixed_ref[at], total_ref[at], peak_ref[at] = run(keys_ref, values_ref)

    @pl.when(y < num_shares)
    def attend_to_prefix():
        length, layer = length_ref[b], layer_ref[0]
        blocks = lax.div(length + (TILE - 1), np.int32(TILE))
        each = lax.div(blocks + (num_shares - 1), np.int32(num_shares))
        first = jnp.minimum(y * each, blocks)

        def step(indices, k_smem, v_smem, sums):
            slots_rx = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 1, layout=plgpu.Layout.WGMMA)
            is_seen_rx = (first + indices[0]) * TILE + slots_rx < length
            logits_rx = jnp.where(is_seen_rx, _logits(q_smem, k_smem), HIDDEN)
            return _add_block(sums, logits_rx, v_smem, weights_smem)

        attend(step, prefix_k_ref.at[b, layer, k], prefix_v_ref.at[b, layer, k], first, jnp.minimum(each, blocks - first))

    @pl.when(y == num_shares)
    def attend_to_new_positions():
        def step(indices, k_smem, v_smem, sums):
            block = pl.ds(indices[0] * TILE, TILE)
            _norm_and_rotate(k_smem, k_turns_ref.at[b, indices[0]], scales_ref.at[key], eps)

            @pl.when((z == 0) & (i == 0))
            def write_keys():
                plgpu.copy_smem_to_gmem(k_smem, new_keys_ref.at[b, block, k])
                plgpu.wait_smem_to_gmem(0)

            hidden_rx = load_wide(hidden_ref.at[b, i, :, block], plgpu.Layout.WGMMA)
            return _add_block(sums, _logits(q_smem, k_smem) + hidden_rx, v_smem, weights_smem)

        attend(step, k_ref.at[b, :, k, key], v_ref.at[b, :, k, value], 0, k_turns_ref.shape[1])


def _norm_and_rotate(x_smem, turns_ref, scales_ref, eps: float | None) -> None:
    """Norms the heads of a tile in place, unless eps is None, and rotates their halves against each other."""
    dtype, head_dim = x_smem.dtype, x_smem.shape[1]
    halves = pl.ds(0, head_dim // 2), pl.ds(head_dim // 2, head_dim // 2)
    parts = [load_wide(x_smem.at[:, half], plgpu.Layout.WGMMA) for half in halves]
    if eps is not None:
        square_r = sum(jnp.sum(part * part, axis=1) for part in parts) / head_dim
        inverse = lax.broadcast_in_dim(lax.rsqrt(square_r + eps), parts[0].shape, [0])
        for n, half in enumerate(halves):
            scale_e = load_wide(scales_ref.at[half], plgpu.Layout.WGMMA.reduce(0))
            normed = (parts[n] * inverse).astype(dtype).astype(jnp.float32)  # rounds where `layers.rms_norm` does
            parts[n] = (normed * lax.broadcast_in_dim(scale_e, normed.shape, [1])).astype(dtype).astype(jnp.float32)
    cos, sin = (load_wide(turns_ref.at[:, half], plgpu.Layout.WGMMA) for half in halves)
    first, second = parts
    x_smem[:, halves[0]] = (first * cos - second * sin).astype(dtype)
    x_smem[:, halves[1]] = (second * cos + first * sin).astype(dtype)
    plgpu.commit_smem()  # products and copies then see all earlier writes


def _logits(q_smem, k_smem) -> jax.Array:
    return multiply_tiles(q_smem, k_smem.transpose((1, 0))) * q_smem.shape[1] ** -0.5


def _nothing(rows: int, head_dim: int) -> SoftmaxSums:
    mixed_re = plgpu.layout_cast(jnp.zeros((rows, head_dim), jnp.float32), plgpu.Layout.WGMMA)
    total_r = plgpu.layout_cast(jnp.full(rows, 0.0, jnp.float32), ROW)
    peak_r = plgpu.layout_cast(jnp.full(rows, HIDDEN, jnp.float32), ROW)
    return mixed_re, total_r, peak_r


def _add_block(sums: SoftmaxSums, logits_rx: jax.Array, v_smem, weights_smem) -> SoftmaxSums:
    """Adds the values of a block, with an online softmax."""
    mixed_re, total_r, before_r = sums
    peak_r = jnp.maximum(before_r, jnp.max(logits_rx, axis=1))
    weights_rx = jnp.exp(logits_rx - lax.broadcast_in_dim(peak_r, logits_rx.shape, [0]))
    kept_r = jnp.exp(before_r - peak_r)
    weights_smem[...] = weights_rx.astype(weights_smem.dtype)
    plgpu.commit_smem()
    mixed_re = mixed_re * lax.broadcast_in_dim(kept_r, mixed_re.shape, [0]) + multiply_tiles(weights_smem, v_smem)
    return mixed_re, total_r * kept_r + jnp.sum(weights_rx, axis=1), peak_r


def multiply_tiles(left_smem, right_smem) -> jax.Array:
    """Returns the matrix product in float32."""

    def run(sums_ref):
        plgpu.wgmma(sums_ref, left_smem, right_smem)
        return sums_ref[...]

    return pl.run_scoped(run, plgpu.ACC((left_smem.shape[0], right_smem.shape[1]), jnp.float32))


def load_wide(ref, layout: Any) -> jax.Array:
    """Returns an array in registers, in float32."""
    return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)
