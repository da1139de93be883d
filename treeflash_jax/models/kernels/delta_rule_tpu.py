"""The gated delta rule as a Pallas kernel for TPUs, with a program for each value head of each sequence.

It is a variant of `delta_rule.attend`, for up to BLOCK positions, because XLA expands the triangular solve into loops. The
system is solved by sweeps u <- right - A u. After i sweeps, every position of depth below i is exact, so there are as
many sweeps as the longest path has positions. The rounding error is as in substitution, because no power of A appears. The
kernel was compiled for v5e and v5p.

Shape suffixes: as in `delta_rule`.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from treeflash_jax.models.delta_rule import BLOCK, on_each_device

HIGHEST = lax.Precision.HIGHEST
TAKES = f"up to {BLOCK} positions, and states in float32"


def supports(q_btge, k_btge, v_bthf, decay_bth, beta_bth, state_bgez, mask_btu) -> bool:
    return q_btge.shape[1] <= BLOCK and state_bgez.dtype == jnp.float32


def run(
    q_btge: jax.Array,
    k_btge: jax.Array,
    v_bthf: jax.Array,
    decay_bth: jax.Array,
    beta_bth: jax.Array,
    state_bgez: jax.Array,
    mask_btu: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns outputs and updates of the new positions, [b, t, h, f] float32 each, like `delta_rule.attend`.

    On a mesh, every device does this for its sequences and key heads.
    """
    by_platform = partial(lax.platform_dependent, cpu=partial(_run, interpret=True), tpu=_run)
    return on_each_device(by_platform, q_btge, k_btge, v_bthf, decay_bth, beta_bth, state_bgez, mask_btu)


def _run(q_btge, k_btge, v_bthf, decay_bth, beta_bth, state_bgez, mask_btu, *, interpret=False):
    (batch, size, groups, key_dim), (heads, value_dim) = q_btge.shape, v_bthf.shape[2:]
    mask_btu, each = mask_btu.astype(jnp.float32), heads // groups
    wide = [x.astype(jnp.float32) for x in (q_btge, k_btge, v_bthf, decay_bth, beta_bth)]
    q_bgte, k_bgte, v_bhtf, decay_bht, beta_bht = (jnp.swapaxes(x, 1, 2) for x in wide)
    total_bht = jnp.einsum("btu,bhu->bht", mask_btu, decay_bht, precision=HIGHEST)

    def of_head(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, *shape), lambda b, h: (b, h, 0, 0))

    of_key_head = pl.BlockSpec((1, 1, size, key_dim), lambda b, h: (b, h // each, 0, 0))
    column, row, values = of_head(size, 1), of_head(1, size), of_head(size, value_dim)
    out_bhtf, updates_bhtf = pl.pallas_call(
        _kernel,
        grid=(batch, heads),
        in_specs=[
            of_key_head, of_key_head, values, column, row, column, pl.BlockSpec((1, size, size), lambda b, h: (b, 0, 0)),
            pl.BlockSpec((1, 1, key_dim, value_dim), lambda b, h: (b, h // each, 0, h % each)),
        ],
        out_specs=[values, values],
        out_shape=[jax.ShapeDtypeStruct((batch, heads, size, value_dim), jnp.float32)] * 2,
        interpret=interpret,
        name="gated_delta_rule",
    )(
        q_bgte, k_bgte, v_bhtf, total_bht[..., None], total_bht[:, :, None], beta_bht[..., None], mask_btu,
        state_bgez.astype(jnp.float32),
    )  # fmt: skip
    return jnp.swapaxes(out_bhtf, 1, 2), jnp.swapaxes(updates_bhtf, 1, 2)


def _kernel(q_ref, k_ref, v_ref, total_ref, total_row_ref, beta_ref, mask_ref, state_ref, out_ref, updates_ref):
    dot = partial(jnp.dot, precision=HIGHEST, preferred_element_type=jnp.float32)
    q_te = q_ref[0, 0]
    k_te = k_ref[0, 0]
    v_tf = v_ref[0, 0]
    state_ef = state_ref[0, 0]
    total_t1, total_1u, beta_t1 = total_ref[0, 0], total_row_ref[0, 0], beta_ref[0, 0]
    is_seen_tu = mask_ref[0] > 0
    fade_tu = jnp.where(is_seen_tu, jnp.exp(jnp.where(is_seen_tu, total_t1 - total_1u, 0.0)), 0.0)
    rows_tu = lax.broadcasted_iota(jnp.int32, fade_tu.shape, 0)
    columns_tu = lax.broadcasted_iota(jnp.int32, fade_tu.shape, 1)
    kept_t1 = jnp.where(is_seen_tu[:, :1], jnp.exp(total_t1), 0.0)
    system_tu = jnp.where(rows_tu != columns_tu, fade_tu * dot(k_te, k_te.T), 0.0) * beta_t1
    right_tf = beta_t1 * (v_tf - kept_t1 * dot(k_te, state_ef))
    sweeps = jnp.max(jnp.sum(mask_ref[0], axis=1)).astype(jnp.int32)
    updates_tf = lax.fori_loop(0, sweeps, lambda _, u_tf: right_tf - dot(system_tu, u_tf), jnp.zeros_like(right_tf))
    out_ref[0, 0] = kept_t1 * dot(q_te, state_ef) + dot(fade_tu * dot(q_te, k_te.T), updates_tf)
    updates_ref[0, 0] = updates_tf
