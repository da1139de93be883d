"""The gated delta rule as a Pallas kernel for Hopper GPUs (Mosaic), with a program for each value head of each sequence.

It is a variant of `delta_rule.attend`, for up to BLOCK positions and heads of 64 or 128. Hopper's matrix units take no
float32, so an operand is the sum of three bfloat16 numbers, and a product is the sum of six of their products. The system
is solved by its inverse. The inverse is built from the inverses of blocks on its diagonal, and is as stable as
substitution. The kernel was compiled for an H200.

Shape suffixes: as in `delta_rule`; r rows and x columns of an operand.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from treeflash_jax.models.delta_rule import BLOCK, on_each_device
from treeflash_jax.models.kernels.attention_mosaic import interpreter

PIECES = 3  # bfloat16 numbers per float32, of 8 bits each
PAIRS = [(i, j) for i in range(PIECES) for j in range(PIECES - i)]  # other products are below a float32's last bit
TAKES = f"2 to {BLOCK} positions, heads of 64 or 128, and states in float32"
TILE, ROW, COLUMN = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


def supports(q_btge, k_btge, v_bthf, decay_bth, beta_bth, state_bgez, mask_btu) -> bool:
    """Returns whether the kernel applies. For one token, XLA launches fewer operations than with the kernel."""
    has_sizes = {q_btge.shape[-1], v_bthf.shape[-1]} <= {64, 128} and 1 < q_btge.shape[1] <= BLOCK
    return has_sizes and state_bgez.dtype == jnp.float32


def run(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns outputs and updates of the new positions, [b, t, h, f] float32 each, like `delta_rule.attend`.

    On a mesh, every device does this for its sequences and key heads. A CPU interprets the kernel, slowly.
    """
    return on_each_device(_run, *arrays)


def _run(q_btge, k_btge, v_bthf, decay_bth, beta_bth, state_bgez, mask_btu):
    (batch, size, groups, key_dim), (heads, value_dim) = q_btge.shape, v_bthf.shape[2:]

    def padded(x_bt: jax.Array) -> jax.Array:
        return jnp.pad(x_bt.astype(jnp.float32), ((0, 0), (0, BLOCK - size)) + ((0, 0),) * (x_bt.ndim - 2))

    mask_btu = jnp.pad(padded(mask_btu), ((0, 0), (0, 0), (0, BLOCK - size)))
    decay_bht = jnp.swapaxes(padded(decay_bth), 1, 2)
    beta_bht = jnp.swapaxes(padded(beta_bth), 1, 2)
    kernel = plgpu.kernel(
        partial(_kernel, each=heads // groups),
        grid=(batch, heads),
        grid_names=("b", "h"),
        out_type=[jax.ShapeDtypeStruct((batch, BLOCK, heads, value_dim), jnp.float32)] * 2,
        scratch_types=[
            [plgpu.SMEM((BLOCK, key_dim), jnp.bfloat16)] * PIECES,
            [plgpu.SMEM((key_dim, max(key_dim, value_dim)), jnp.bfloat16)] * PIECES,
            plgpu.SMEM((BLOCK,), jnp.float32),
        ],
        interpret=interpreter(),
        kernel_name="gated_delta_rule",
    )
    results = kernel(*map(padded, (q_btge, k_btge, v_bthf)), decay_bht, beta_bht, mask_btu, state_bgez)
    return tuple(x_bthf[:, :size] for x_bthf in results)


def _kernel(
    q_ref, k_ref, v_ref, decay_ref, beta_ref, mask_ref, state_ref, out_ref, updates_ref, left_smem, right_smem, total_smem,
    *, each
):  # fmt: skip
    """Computes one head. Operands are loaded again for each product, because registers hold few of them."""
    b, h = lax.axis_index("b"), lax.axis_index("h")
    key_dim, value_dim = k_ref.shape[3], v_ref.shape[3]
    g, first = lax.div(h, each), lax.rem(h, each) * value_dim
    product = partial(_product, left_smem, right_smem)
    store_left, store_right = partial(_store, left_smem), partial(_store, right_smem)

    def read(x_ref) -> jax.Array:
        """Returns S_0^T x with all decays up to the position."""
        store_left(_load(x_ref.at[b, :, g], TILE))
        for row in range(0, key_dim, BLOCK):
            store_right(_load(state_ref.at[b, g, pl.ds(row, BLOCK), pl.ds(first, value_dim)], TILE), row)
        return _scale(product(key_dim, value_dim), kept_t)

    mask_tu, decay_u = _load(mask_ref.at[b], TILE), _load(decay_ref.at[b, h], COLUMN)
    total_t = jnp.sum(mask_tu * lax.broadcast_in_dim(decay_u, mask_tu.shape, [1]), axis=1)
    total_smem[...] = total_t
    plgpu.commit_smem()
    total_u = _load(total_smem, COLUMN)
    gap_tu = lax.broadcast_in_dim(total_t, mask_tu.shape, [0]) - lax.broadcast_in_dim(total_u, mask_tu.shape, [1])
    fade_tu = jnp.where(mask_tu > 0, jnp.exp(jnp.where(mask_tu > 0, gap_tu, 0.0)), 0.0)
    kept_t, beta_t = jnp.exp(total_t) * _load(mask_ref.at[b, :, 0], ROW), _load(beta_ref.at[b, h], ROW)

    k_te = _load(k_ref.at[b, :, g], TILE)
    store_left(k_te)
    store_right(k_te)
    system_tu = _scale(product(key_dim, BLOCK, transposed=True) * fade_tu, beta_t)
    store_left(_load(q_ref.at[b, :, g], TILE))
    scores_tu = product(key_dim, BLOCK, transposed=True) * fade_tu
    rows_tu = plgpu.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), 0, layout=TILE)
    columns_tu = plgpu.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), 1, layout=TILE)
    apart_tu = rows_tu ^ columns_tu  # its highest bit is half the size of the smallest block on the diagonal with both

    def double(step: jax.Array, inverse_tu: jax.Array) -> jax.Array:
        """Returns the inverses of the diagonal blocks of 2^(step + 1) positions, given the inverses of the halves."""
        half = 1 << step
        store_left(inverse_tu)
        store_right(jnp.where((apart_tu >= half) & (apart_tu < 2 * half), system_tu, 0.0))
        store_left(product(BLOCK, BLOCK))
        store_right(inverse_tu)
        return inverse_tu - product(BLOCK, BLOCK)

    inverse_tu = lax.fori_loop(0, BLOCK.bit_length() - 1, double, jnp.where(apart_tu == 0, 1.0, 0.0))
    read_tf = read(k_ref)
    store_left(inverse_tu)
    store_right(_scale(_load(v_ref.at[b, :, h], TILE) - read_tf, beta_t))
    updates_ref[b, :, h] = updates_tf = product(BLOCK, value_dim)
    store_left(scores_tu)
    store_right(updates_tf)
    out_ref[b, :, h] = product(BLOCK, value_dim) + read(q_ref)


def _product(left_smem, right_smem, inner: int, columns: int, *, transposed: bool = False) -> jax.Array:
    """Returns the stored left operand [t, inner] times the right one, [inner, columns] or transposed."""

    def run(sums_ref):
        for i, j in PAIRS:
            if transposed:
                piece_smem = right_smem[j].at[:columns, :inner].transpose((1, 0))
            else:
                piece_smem = right_smem[j].at[:inner, :columns]
            plgpu.wgmma(sums_ref, left_smem[i].at[:, :inner], piece_smem)
        sums_rx = sums_ref[...]
        plgpu.commit_smem()  # all warps have read the operands before one of them writes the next
        return sums_rx

    return pl.run_scoped(run, plgpu.ACC((BLOCK, columns), jnp.float32))


def _store(operand_smem, x_rx: jax.Array, row: int = 0) -> None:
    """Writes an operand, or its rows from `row` on."""
    rows, columns = x_rx.shape
    for piece_smem in operand_smem:
        piece_rx = x_rx.astype(jnp.bfloat16)
        piece_smem[row : row + rows, :columns] = piece_rx
        x_rx = x_rx - piece_rx.astype(jnp.float32)
    plgpu.commit_smem()  # products then see all earlier writes


def _scale(x_rx: jax.Array, scale_r: jax.Array) -> jax.Array:
    return x_rx * lax.broadcast_in_dim(scale_r, x_rx.shape, [0])


def _load(ref, layout) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)
