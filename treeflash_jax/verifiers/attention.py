"""Attention of new rows over a cached prefix and over each other, under one softmax.

Every new row sees all committed rows and, among the new rows, those its mask names: ancestors in a draft tree, earlier
rows in a prefill chunk, everything in a drafter's block, itself alone in a one-token step. No [new, context] mask exists.

"xla" reads the whole capacity of the cache and is what the others are tested against. "streamed" and the Pallas kernels
read the prefix block by block under an online softmax, and nothing of it past the block that holds its last row.

Shape suffixes: b batch, t new rows (queries), u new rows (keys), s cache slots, h query heads, k key/value heads,
g = h / k, r = g t, x any kind of key, y shares of the prefix, e head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from treeflash_jax import devices
from treeflash_jax import mesh as meshes
from treeflash_jax.verifiers import cache as caches
from treeflash_jax.verifiers.cache import LayerKV

CHUNKS, LEAST_CHUNK = 8, 128  # of a full cache, at most; slots of each, at least
FEW_ROWS = 8  # queries of a key/value head that a CPU multiplies key by key
SHORT, SHORT_FOR_ONE_ROW = 512, 2048  # slots of caches below which "xla" is faster, as measured on CPUs


def tree_attention(
    q_bthe: jax.Array,
    k_buke: jax.Array,
    v_buke: jax.Array,
    mask_btu: jax.Array,
    prefix: LayerKV | None = None,
    length_b: jax.Array | None = None,
    *,
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
      scale: of the logits; 1 / sqrt(e) if None.
      implementation: a name in IMPLEMENTATIONS.

    Returns:
      [b, t, h, e] in the dtype of the queries; softmax in float32 at least.

    Raises:
      ValueError: an implementation that is not registered, or that these devices or sizes cannot run.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"got attention implementation {implementation!r}, expected one of {sorted(IMPLEMENTATIONS)}")
    scale = q_bthe.shape[-1] ** -0.5 if scale is None else scale
    attend = IMPLEMENTATIONS[implementation]
    return attend(q_bthe, k_buke, v_buke, mask_btu, prefix, length_b, scale)


def positions_read(implementation: str, slots: int, length: jax.Array | int) -> jax.Array | int:
    """How much of a cache attention reads where the longest prefix has `length` rows: its time follows from that.

    A single row under "streamed" reads all of a cache of less than SHORT_FOR_ONE_ROW slots, which takes it no longer.
    """
    reads_all = implementation in ("xla", "chunked") or (implementation == "streamed" and slots < SHORT)
    return slots if reads_all else length


def _xla(q_bthe, k_buke, v_buke, mask_btu, prefix, length_b, scale):
    batch, rows = q_bthe.shape[:2]
    q_bkre, k_bkue, v_bkue = _stacked(q_bthe, k_buke.shape[2]), jnp.swapaxes(k_buke, 1, 2), jnp.swapaxes(v_buke, 1, 2)
    own_bkru = _logits(q_bkre, k_bkue, mask_btu, scale)
    peak_bkr1 = jnp.max(own_bkru, axis=-1, keepdims=True)
    if prefix is not None:
        slots = jnp.arange(prefix.keys_bkse.shape[2])
        seen_bts = jnp.broadcast_to((slots < length_b[:, None])[:, None], (batch, rows, slots.size))
        past_bkrs = _logits(q_bkre, prefix.keys_bkse, seen_bts, scale)
        peak_bkr1 = jnp.maximum(peak_bkr1, jnp.max(past_bkrs, axis=-1, keepdims=True))

    own_bkru = jnp.exp(own_bkru - peak_bkr1)
    total_bkr = jnp.sum(own_bkru, axis=-1)
    mixed_bkre = _mix(own_bkru, v_bkue)
    if prefix is not None:
        past_bkrs = jnp.exp(past_bkrs - peak_bkr1)
        total_bkr += jnp.sum(past_bkrs, axis=-1)
        mixed_bkre += _mix(past_bkrs, prefix.values_bkse)
    return _unstacked(mixed_bkre / total_bkr[..., None], q_bthe)


def _chunked(q_bthe, k_buke, v_buke, mask_btu, prefix, length_b, scale):
    """`_xla` over 256 queries at a time, formed again in a backward pass: long rows, as in training, in bounded memory."""
    rows, size = q_bthe.shape[1], 256
    if rows <= size or rows % size:
        return _xla(q_bthe, k_buke, v_buke, mask_btu, prefix, length_b, scale)

    @jax.checkpoint
    def attend(chunk):
        q_bche, mask_bcu = chunk
        return _xla(q_bche, k_buke, v_buke, mask_bcu, prefix, length_b, scale)

    def split(x):
        return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)

    return jnp.moveaxis(lax.map(attend, (split(q_bthe), split(mask_btu))), 0, 1).reshape(q_bthe.shape)


class Part(NamedTuple):
    """Attention over some of the keys, not yet divided; l are a row's logits.

    Attributes:
      mixed_bkre: sum_x exp(l_x - peak) v_x.
      total_bkr: sum_x exp(l_x - peak).
      peak_bkr: max_x l_x.
    """

    mixed_bkre: jax.Array
    total_bkr: jax.Array
    peak_bkr: jax.Array


def _streamed(q_bthe, k_buke, v_buke, mask_btu, prefix, length_b, scale):
    """Chunk by chunk up to the longest prefix; no array of logits is longer than a chunk.

    A chunk is copied before it is multiplied, which a single row does not make up for in a short cache.
    """
    slots = 0 if prefix is None else prefix.keys_bkse.shape[2]
    if slots < (SHORT_FOR_ONE_ROW if q_bthe.shape[1] == 1 else SHORT):
        return _xla(q_bthe, k_buke, v_buke, mask_btu, prefix, length_b, scale)
    size = max(LEAST_CHUNK, -(-slots // CHUNKS))

    def past(own: Part, q_bkre: jax.Array, prefix: LayerKV, length_b: jax.Array) -> Part:
        def step(index: jax.Array, part: Part) -> Part:
            first = index * size
            at = jnp.minimum(first, slots - size)  # the last chunk may overlap the one before
            at_x = at + jnp.arange(size)
            seen_b1x = ((at_x >= first) & (at_x < length_b[:, None]))[:, None]
            keys_bkxe = lax.dynamic_slice_in_dim(prefix.keys_bkse, at, size, axis=2)
            values_bkxe = lax.dynamic_slice_in_dim(prefix.values_bkse, at, size, axis=2)
            return _extended(part, q_bkre, keys_bkxe, values_bkxe, seen_b1x, scale)

        return lax.fori_loop(0, (jnp.max(length_b) + size - 1) // size, step, own)

    return _over_parts(past, q_bthe, k_buke, v_buke, mask_btu, prefix, length_b, scale)


def _pallas(kind, q_bthe, k_buke, v_buke, mask_btu, prefix, length_b, scale):
    """A kernel for the prefix, merged with the rows' own part; interpreted, slowly, on a CPU."""
    if prefix is None:
        return _xla(q_bthe, k_buke, v_buke, mask_btu, prefix, length_b, scale)
    backend = devices.here().backend
    if backend not in ("cpu", kind):
        raise ValueError(f"got attention implementation 'pallas-{kind}' on a {backend}, expected 'xla' or 'streamed'")
    if kind == "gpu":
        from treeflash_jax.kernels import gpu as kernel
    else:
        from treeflash_jax.kernels import tpu as kernel

    def past(own: Part, q_bkre: jax.Array, prefix: LayerKV, length_b: jax.Array) -> Part:
        run = partial(kernel.attend, scale=scale)
        compiled = {"cuda" if kind == "gpu" else "tpu": partial(run, interpret=False)}
        arrays = q_bkre, prefix.keys_bkse, prefix.values_bkse, length_b
        mixed_bkyre, total_bkyr, peak_bkyr = lax.platform_dependent(*arrays, cpu=partial(run, interpret=True), **compiled)
        peak_bkr = jnp.maximum(own.peak_bkr, jnp.max(peak_bkyr, axis=2))
        kept_bkr, kept_bkyr = jnp.exp(own.peak_bkr - peak_bkr), jnp.exp(peak_bkyr - peak_bkr[:, :, None])
        mixed_bkre = own.mixed_bkre * kept_bkr[..., None] + jnp.sum(mixed_bkyre * kept_bkyr[..., None], axis=2)
        return Part(mixed_bkre, own.total_bkr * kept_bkr + jnp.sum(total_bkyr * kept_bkyr, axis=2), peak_bkr)

    return _over_parts(past, q_bthe, k_buke, v_buke, mask_btu, prefix, length_b, scale)


def _over_parts(
    past: Callable[[Part, jax.Array, LayerKV, jax.Array], Part],
    q_bthe: jax.Array,
    k_buke: jax.Array,
    v_buke: jax.Array,
    mask_btu: jax.Array,
    prefix: LayerKV,
    length_b: jax.Array,
    scale: float,
) -> jax.Array:
    """The new rows' own part, extended by `past(own, q_bkre, prefix, length_b)`.

    On a mesh every device does this for its own rows and heads and waits for no other. Query heads follow their key/value
    head: where the model axis does not divide those, all devices along it do the same.
    """

    def attend(q_bthe, k_buke, v_buke, mask_btu, prefix, length_b):
        q_bkre = _stacked(q_bthe, k_buke.shape[2])
        own = _extended(None, q_bkre, jnp.swapaxes(k_buke, 1, 2), jnp.swapaxes(v_buke, 1, 2), mask_btu, scale)
        part = past(own, q_bkre, prefix, length_b)
        return _unstacked(part.mixed_bkre / part.total_bkr[..., None], q_bthe)

    arrays = q_bthe, k_buke, v_buke, mask_btu, prefix, length_b
    mesh = meshes.current()
    names = set() if mesh is None else set(mesh.axis_names) - meshes.manual_axes(mesh)
    if not names:
        return attend(*arrays)
    heads = meshes.partition(("batch", None, "kv_heads", None), k_buke.shape, mesh)
    slots = meshes.partition(caches.AXES, prefix.keys_bkse.shape, mesh)
    rows = meshes.partition(("batch",), length_b.shape, mesh)
    specs = (heads, heads, heads, PartitionSpec(*rows, None, None), slots, rows)
    return jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=heads, axis_names=names, check_vma=False)(*arrays)


def _extended(
    part: Part | None, q_bkre: jax.Array, keys_bkxe: jax.Array, values_bkxe: jax.Array, seen_btx: jax.Array, scale: float
) -> Part:
    """`part` with more keys under the same softmax. The first part must show every row something."""
    logits_bkrx = _logits(q_bkre, keys_bkxe, seen_btx, scale)
    peak_bkr = jnp.max(logits_bkrx, axis=-1)
    if part is not None:
        peak_bkr = jnp.maximum(part.peak_bkr, peak_bkr)
    weights_bkrx = jnp.exp(logits_bkrx - peak_bkr[..., None])
    mixed_bkre, total_bkr = _mix(weights_bkrx, values_bkxe), jnp.sum(weights_bkrx, axis=-1)
    if part is None:
        return Part(mixed_bkre, total_bkr, peak_bkr)
    kept_bkr = jnp.exp(part.peak_bkr - peak_bkr)
    return Part(part.mixed_bkre * kept_bkr[..., None] + mixed_bkre, part.total_bkr * kept_bkr + total_bkr, peak_bkr)


def _stacked(q_bthe: jax.Array, kv_heads: int) -> jax.Array:
    """[b, k, r, e]: query heads of one key/value head as rows, r = g t.

    That makes plain batched products, and nothing as large as the logits is ever transposed.
    """
    batch, rows, _, head_dim = q_bthe.shape
    q_bkgte = jnp.moveaxis(q_bthe.reshape(batch, rows, kv_heads, -1, head_dim), 1, 3)
    return q_bkgte.reshape(batch, kv_heads, -1, head_dim)


def _unstacked(mixed_bkre: jax.Array, q_bthe: jax.Array) -> jax.Array:
    """Rows back to the layout and dtype of the queries."""
    batch, rows, _, head_dim = q_bthe.shape
    mixed_bkgte = mixed_bkre.reshape(batch, mixed_bkre.shape[1], -1, rows, head_dim)
    return jnp.moveaxis(mixed_bkgte, 3, 1).reshape(q_bthe.shape).astype(q_bthe.dtype)


def _logits(q_bkre: jax.Array, keys_bkxe: jax.Array, seen_btx: jax.Array, scale: float) -> jax.Array:
    """[b, k, r, x], -inf where not seen; the t axis of `seen` may be 1."""
    wide = jnp.promote_types(q_bkre.dtype, jnp.float32)
    score = partial(jnp.einsum, "bkre,bkxe->bkrx", preferred_element_type=wide)
    if q_bkre.shape[2] <= FEW_ROWS and q_bkre.dtype != jnp.bfloat16:
        logits_bkrx = lax.platform_dependent(q_bkre, keys_bkxe, cpu=_key_by_key, default=score) * scale
    else:
        logits_bkrx = score(q_bkre, keys_bkxe) * scale
    logits_bkgtx = logits_bkrx.reshape(*q_bkre.shape[:2], -1, *seen_btx.shape[1:])
    return jnp.where(seen_btx[:, None, None], logits_bkgtx, -jnp.inf).reshape(logits_bkrx.shape)


def _key_by_key(q_bkre: jax.Array, keys_bkxe: jax.Array) -> jax.Array:
    """Products of few rows with many keys, [b, k, r, x], the keys on the left: on the right a CPU would copy all of them.

    The barrier keeps XLA from exchanging the sides again.
    """
    wide = jnp.promote_types(q_bkre.dtype, jnp.float32)
    logits_bkxr = jnp.einsum("bkxe,bkre->bkxr", keys_bkxe, q_bkre, preferred_element_type=wide)
    return jnp.swapaxes(lax.optimization_barrier(logits_bkxr), 2, 3)


def _mix(weights_bkrx: jax.Array, values_bkxe: jax.Array) -> jax.Array:
    weights_bkrx, wide = weights_bkrx.astype(values_bkxe.dtype), weights_bkrx.dtype
    return jnp.einsum("bkrx,bkxe->bkre", weights_bkrx, values_bkxe, preferred_element_type=wide)


IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {
    "xla": _xla,
    "chunked": _chunked,
    "streamed": _streamed,
    "pallas-gpu": partial(_pallas, "gpu"),
    "pallas-tpu": partial(_pallas, "tpu"),
}

TRAINING = "chunked"  # for rows without a prefix; the others are what a caller may choose
CHOICES = tuple(name for name in IMPLEMENTATIONS if name != TRAINING)
