"""Attention of new rows over a cached prefix and over each other, under one softmax.

Every new row sees all committed rows and, among the new rows, those its mask names: ancestors in a draft tree, earlier
rows in a prefill chunk, everything in a drafter's block, itself alone in a one-token step. No [new, context] mask exists.

Shape suffixes: b batch, t new rows (queries), u new rows (keys), s cache slots, h query heads, k key/value heads,
g = h / k, r = g t, x either kind of key, e head dim.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from treeflash_jax.cache import LayerKV


def tree_attention(
    q_bthe: jax.Array,
    k_buke: jax.Array,
    v_buke: jax.Array,
    mask_btu: jax.Array,
    prefix: LayerKV | None = None,
    length_b: jax.Array | None = None,
    *,
    positions_bt: jax.Array | None = None,
    window: int | None = None,
    scale: float | None = None,
    implementation: str = "xla",
) -> jax.Array:
    """softmax(q [K_prefix; K_new]^T * scale) [V_prefix; V_new], prefix rows limited to the first `length_b`.

    Args:
      q_bthe: queries of the new rows.
      k_buke: keys of the new rows.
      v_buke: values of the new rows.
      mask_btu: True where new row t sees new row u. Every row must see itself.
      prefix: committed keys and values; cache slot s holds absolute position s. None: no prefix.
      length_b: committed rows per sequence.
      positions_bt: absolute positions of the new rows; needed with a window only.
      window: rows further back than this many positions are invisible (sliding-window layers).
      scale: of the logits; 1 / sqrt(e) if None.
      implementation: a name in IMPLEMENTATIONS.

    Returns:
      [b, t, h, e] in the dtype of the queries; softmax in float32 at least.

    Raises:
      ValueError: an implementation nobody registered.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"got attention implementation {implementation!r}, expected one of {sorted(IMPLEMENTATIONS)}")
    scale = q_bthe.shape[-1] ** -0.5 if scale is None else scale
    if window is not None:
        gap_btu = positions_bt[:, :, None] - positions_bt[:, None, :]
        mask_btu = mask_btu & (gap_btu < window)
    attend = IMPLEMENTATIONS[implementation]
    return attend(q_bthe, k_buke, v_buke, mask_btu, prefix, length_b, positions_bt, window, scale)


def _xla(q_bthe, k_buke, v_buke, mask_btu, prefix, length_b, positions_bt, window, scale):
    batch, rows, heads, head_dim = q_bthe.shape
    kv_heads = k_buke.shape[2]
    wide = jnp.promote_types(q_bthe.dtype, jnp.float32)
    # Query heads of one key/value head are stacked as rows, r = g t: plain batched products, and nothing as large as the
    # logits is ever transposed.
    q_bkgte = jnp.moveaxis(q_bthe.reshape(batch, rows, kv_heads, -1, head_dim), 1, 3)
    q_bkre = q_bkgte.reshape(batch, kv_heads, -1, head_dim)
    k_bkue, v_bkue = jnp.swapaxes(k_buke, 1, 2), jnp.swapaxes(v_buke, 1, 2)

    def logits(keys_bkxe: jax.Array, seen_btx: jax.Array) -> jax.Array:
        logits_bkrx = jnp.einsum("bkre,bkxe->bkrx", q_bkre, keys_bkxe, preferred_element_type=wide) * scale
        logits_bkgtx = logits_bkrx.reshape(*q_bkgte.shape[:4], -1)
        return jnp.where(seen_btx[:, None, None], logits_bkgtx, -jnp.inf).reshape(logits_bkrx.shape)

    def mix(weights_bkrx: jax.Array, values_bkxe: jax.Array) -> jax.Array:
        weights_bkrx = weights_bkrx.astype(values_bkxe.dtype)
        return jnp.einsum("bkrx,bkxe->bkre", weights_bkrx, values_bkxe, preferred_element_type=wide)

    own_bkru = logits(k_bkue, mask_btu)
    peak_bkr1 = jnp.max(own_bkru, axis=-1, keepdims=True)
    if prefix is not None:
        slots = jnp.arange(prefix.keys_bkse.shape[2])
        seen_bts = jnp.broadcast_to((slots < length_b[:, None])[:, None], (batch, rows, slots.size))
        if window is not None:
            seen_bts &= positions_bt[:, :, None] - slots < window
        past_bkrs = logits(prefix.keys_bkse, seen_bts)
        peak_bkr1 = jnp.maximum(peak_bkr1, jnp.max(past_bkrs, axis=-1, keepdims=True))

    own_bkru = jnp.exp(own_bkru - peak_bkr1)
    total_bkr = jnp.sum(own_bkru, axis=-1)
    mixed_bkre = mix(own_bkru, v_bkue)
    if prefix is not None:
        past_bkrs = jnp.exp(past_bkrs - peak_bkr1)
        total_bkr += jnp.sum(past_bkrs, axis=-1)
        mixed_bkre += mix(past_bkrs, prefix.values_bkse)
    mixed_bkgte = (mixed_bkre / total_bkr[..., None]).reshape(q_bkgte.shape)
    return jnp.moveaxis(mixed_bkgte, 3, 1).reshape(batch, rows, heads, head_dim).astype(q_bthe.dtype)


def _chunked(q_bthe, k_buke, v_buke, mask_btu, prefix, length_b, positions_bt, window, scale):
    """`_xla` over 256 queries at a time, formed again in a backward pass: long rows, as in training, in bounded memory."""
    rows, size = q_bthe.shape[1], 256
    if rows <= size or rows % size or positions_bt is not None:
        return _xla(q_bthe, k_buke, v_buke, mask_btu, prefix, length_b, positions_bt, window, scale)

    @jax.checkpoint
    def attend(chunk):
        q_bche, mask_bcu = chunk
        return _xla(q_bche, k_buke, v_buke, mask_bcu, prefix, length_b, None, window, scale)

    def split(x):
        return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)

    return jnp.moveaxis(jax.lax.map(attend, (split(q_bthe), split(mask_btu))), 0, 1).reshape(q_bthe.shape)


IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {"xla": _xla, "chunked": _chunked}
