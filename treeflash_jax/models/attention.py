"""Attention of new positions over a cached prefix and over each other, under one softmax.

Every new position sees the whole committed prefix and the new positions in its mask: ancestors in a draft tree, earlier
positions in a prefill chunk, everything in a drafter's block, itself alone in a one-token step. No [new, context] mask
exists.

"xla" reads the whole capacity of the cache and is the reference that the others are tested against. "streamed" and the
Pallas kernels read the prefix block by block under an online softmax, up to the block that holds its last position.
"splash", "cudnn" and "chunked" are for packed sequences without a prefix, in training.

Shape suffixes: b batch, t new positions (queries), u new positions (keys), s cache slots, h query heads, k key/value heads,
g = h / k, q = g t queries of one key/value head, x any kind of key, y shares of the prefix, e head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from treeflash_jax.core import sharding
from treeflash_jax.models import kv_cache
from treeflash_jax.models.backend import attention_kernels, packed_attention, products
from treeflash_jax.models.backend.packed_attention import PackedMask
from treeflash_jax.models.kv_cache import LayerKV

MAX_CHUNKS, MIN_CHUNK_SLOTS = 8, 128
SHORT, SHORT_FOR_ONE_QUERY = 512, 2048  # slots of caches below which "xla" is faster, as measured on CPUs
TRAINING_CHUNK = 256  # queries


def tree_attention(
    q_bthe: jax.Array,
    k_buke: jax.Array,
    v_buke: jax.Array,
    mask_btu: jax.Array | PackedMask,
    prefix: LayerKV | None = None,
    length_b: jax.Array | None = None,
    *,
    implementation: str = "xla",
) -> jax.Array:
    """Computes softmax(q [K_prefix; K_new]^T / sqrt(e)) [V_prefix; V_new] over the first `length_b` slots of the prefix.

    Returns [b, t, h, e] in the dtype of the queries; the softmax is in float32 at least. Raises ValueError for sizes that
    the implementation does not support.

    Args:
      q_bthe, k_buke, v_buke: queries, keys and values of the new positions.
      mask_btu: True if new position t sees new position u. Every position must see itself.
      prefix: committed keys and values; cache slot s holds absolute position s. None: no prefix.
      length_b: number of committed positions per sequence.
      implementation: a name in IMPLEMENTATIONS.
    """
    if isinstance(mask_btu, PackedMask):
        if packed_attention.supports(implementation, q_bthe, k_buke):
            return packed_attention.attend(implementation, q_bthe, k_buke, v_buke, mask_btu)
        mask_btu = mask_btu.dense()
    return IMPLEMENTATIONS[implementation](q_bthe, k_buke, v_buke, mask_btu, prefix, length_b)


def positions_read(implementation: str, slots: int, length: jax.Array | int) -> jax.Array | int:
    """Returns the number of cache positions that attention reads, given the length of the longest prefix.

    A single query under "streamed" reads all of a cache of less than SHORT_FOR_ONE_QUERY slots, which takes no longer.
    """
    reads_all = implementation in ("xla", "chunked") or (implementation == "streamed" and slots < SHORT)
    return slots if reads_all else length


def _xla(q_bthe, k_buke, v_buke, mask_btu, prefix, length_b):
    batch, queries = q_bthe.shape[:2]
    q_bkqe, k_bkue, v_bkue = _group_queries(q_bthe, k_buke.shape[2]), jnp.swapaxes(k_buke, 1, 2), jnp.swapaxes(v_buke, 1, 2)
    new_bkqu = _logits(q_bkqe, k_bkue, mask_btu)
    peak_bkq1 = jnp.max(new_bkqu, axis=-1, keepdims=True)
    if prefix is not None:
        slots = jnp.arange(prefix.keys_bkse.shape[2])
        seen_bts = jnp.broadcast_to((slots < length_b[:, None])[:, None], (batch, queries, slots.size))
        past_bkqs = _logits(q_bkqe, prefix.keys_bkse, seen_bts)
        peak_bkq1 = jnp.maximum(peak_bkq1, jnp.max(past_bkqs, axis=-1, keepdims=True))

    new_bkqu = jnp.exp(new_bkqu - peak_bkq1)
    total_bkq = jnp.sum(new_bkqu, axis=-1)
    mixed_bkqe = _mix(new_bkqu, v_bkue)
    if prefix is not None:
        past_bkqs = jnp.exp(past_bkqs - peak_bkq1)
        total_bkq += jnp.sum(past_bkqs, axis=-1)
        mixed_bkqe += _mix(past_bkqs, prefix.values_bkse)
    return _ungroup_queries(mixed_bkqe / total_bkq[..., None], q_bthe)


def _chunked(q_bthe, k_buke, v_buke, mask_btu, prefix, length_b):
    """Runs `_xla` over TRAINING_CHUNK queries at a time, recomputed in backward passes, so that memory is bounded."""
    if q_bthe.shape[1] <= TRAINING_CHUNK or q_bthe.shape[1] % TRAINING_CHUNK:
        return _xla(q_bthe, k_buke, v_buke, mask_btu, prefix, length_b)

    @jax.checkpoint
    def attend(chunk):
        q_bche, mask_bcu = chunk
        return _xla(q_bche, k_buke, v_buke, mask_bcu, prefix, length_b)

    def split(x):
        return jnp.moveaxis(x.reshape(x.shape[0], -1, TRAINING_CHUNK, *x.shape[2:]), 1, 0)

    return jnp.moveaxis(lax.map(attend, (split(q_bthe), split(mask_btu))), 0, 1).reshape(q_bthe.shape)


class Part(NamedTuple):
    """Attention over some of the keys, not yet divided; l are the logits of a query.

    Attributes:
      mixed_bkqe: sum_x exp(l_x - peak) v_x.
      total_bkq: sum_x exp(l_x - peak).
      peak_bkq: max_x l_x.
    """

    mixed_bkqe: jax.Array
    total_bkq: jax.Array
    peak_bkq: jax.Array


def _streamed(q_bthe, k_buke, v_buke, mask_btu, prefix, length_b):
    """Attends chunk by chunk up to the longest prefix; no array of logits is longer than a chunk.

    A chunk is copied before it is multiplied, which costs more than it saves for a single query and a short cache.
    """
    slots = 0 if prefix is None else prefix.keys_bkse.shape[2]
    if slots < (SHORT_FOR_ONE_QUERY if q_bthe.shape[1] == 1 else SHORT):
        return _xla(q_bthe, k_buke, v_buke, mask_btu, prefix, length_b)
    size = max(MIN_CHUNK_SLOTS, -(-slots // MAX_CHUNKS))

    def add_prefix(new: Part, q_bkqe: jax.Array, prefix: LayerKV, length_b: jax.Array) -> Part:
        def step(index: jax.Array, part: Part) -> Part:
            first = index * size
            at = jnp.minimum(first, slots - size)  # the last chunk may overlap the one before
            at_x = at + jnp.arange(size)
            seen_b1x = ((at_x >= first) & (at_x < length_b[:, None]))[:, None]
            keys_bkxe = lax.dynamic_slice_in_dim(prefix.keys_bkse, at, size, axis=2)
            values_bkxe = lax.dynamic_slice_in_dim(prefix.values_bkse, at, size, axis=2)
            return _extend(part, q_bkqe, keys_bkxe, values_bkxe, seen_b1x)

        return lax.fori_loop(0, (jnp.max(length_b) + size - 1) // size, step, new)

    return _attend_in_parts(add_prefix, q_bthe, k_buke, v_buke, mask_btu, prefix, length_b)


def _pallas(kind, q_bthe, k_buke, v_buke, mask_btu, prefix, length_b):
    """Runs a kernel over the prefix and merges its shares with the part of the new positions."""
    if prefix is None:
        return _xla(q_bthe, k_buke, v_buke, mask_btu, prefix, length_b)

    def add_prefix(new: Part, q_bkqe: jax.Array, prefix: LayerKV, length_b: jax.Array) -> Part:
        arrays = q_bkqe, prefix.keys_bkse, prefix.values_bkse, length_b
        mixed_bkyqe, total_bkyq, peak_bkyq = attention_kernels.attend(kind, *arrays)
        peak_bkq = jnp.maximum(new.peak_bkq, jnp.max(peak_bkyq, axis=2))
        kept_bkq, kept_bkyq = jnp.exp(new.peak_bkq - peak_bkq), jnp.exp(peak_bkyq - peak_bkq[:, :, None])
        mixed_bkqe = new.mixed_bkqe * kept_bkq[..., None] + jnp.sum(mixed_bkyqe * kept_bkyq[..., None], axis=2)
        return Part(mixed_bkqe, new.total_bkq * kept_bkq + jnp.sum(total_bkyq * kept_bkyq, axis=2), peak_bkq)

    return _attend_in_parts(add_prefix, q_bthe, k_buke, v_buke, mask_btu, prefix, length_b)


def _attend_in_parts(add_prefix: Callable, q_bthe, k_buke, v_buke, mask_btu, prefix, length_b):
    """Attends to the new positions, then extends that part by `add_prefix(part, q_bkqe, prefix, length_b)`.

    On a mesh every device does this for its own sequences and heads and waits for no other. Query heads follow their
    key/value head: if the model axis does not divide those, all devices along it do the same.
    """

    def attend(q_bthe, k_buke, v_buke, mask_btu, prefix, length_b):
        q_bkqe = _group_queries(q_bthe, k_buke.shape[2])
        new = _extend(None, q_bkqe, jnp.swapaxes(k_buke, 1, 2), jnp.swapaxes(v_buke, 1, 2), mask_btu)
        part = add_prefix(new, q_bkqe, prefix, length_b)
        return _ungroup_queries(part.mixed_bkqe / part.total_bkq[..., None], q_bthe)

    arrays = q_bthe, k_buke, v_buke, mask_btu, prefix, length_b
    heads, batch = (("batch", None, "kv_heads", None), k_buke.shape), (("batch",), length_b.shape)
    layouts = heads, heads, heads, batch, (kv_cache.AXES, prefix.keys_bkse.shape), batch
    return sharding.over_mesh(attend, arrays, layouts)


def _extend(
    part: Part | None, q_bkqe: jax.Array, keys_bkxe: jax.Array, values_bkxe: jax.Array, seen_btx: jax.Array
) -> Part:
    """Adds keys to a part under the same softmax. In the first part, every query must see some key."""
    logits_bkqx = _logits(q_bkqe, keys_bkxe, seen_btx)
    peak_bkq = jnp.max(logits_bkqx, axis=-1)
    if part is not None:
        peak_bkq = jnp.maximum(part.peak_bkq, peak_bkq)
    weights_bkqx = jnp.exp(logits_bkqx - peak_bkq[..., None])
    mixed_bkqe, total_bkq = _mix(weights_bkqx, values_bkxe), jnp.sum(weights_bkqx, axis=-1)
    if part is None:
        return Part(mixed_bkqe, total_bkq, peak_bkq)
    kept_bkq = jnp.exp(part.peak_bkq - peak_bkq)
    return Part(part.mixed_bkqe * kept_bkq[..., None] + mixed_bkqe, part.total_bkq * kept_bkq + total_bkq, peak_bkq)


def _group_queries(q_bthe: jax.Array, kv_heads: int) -> jax.Array:
    """Returns the queries by key/value head, [b, k, q, e].

    Products then are plain batched ones, and nothing as large as the logits is transposed.
    """
    batch, queries, _, head_dim = q_bthe.shape
    q_bkgte = jnp.moveaxis(q_bthe.reshape(batch, queries, kv_heads, -1, head_dim), 1, 3)
    return q_bkgte.reshape(batch, kv_heads, -1, head_dim)


def _ungroup_queries(mixed_bkqe: jax.Array, q_bthe: jax.Array) -> jax.Array:
    """Returns attention outputs in the layout and dtype of the queries."""
    batch, queries, _, head_dim = q_bthe.shape
    mixed_bkgte = mixed_bkqe.reshape(batch, mixed_bkqe.shape[1], -1, queries, head_dim)
    return jnp.moveaxis(mixed_bkgte, 3, 1).reshape(q_bthe.shape).astype(q_bthe.dtype)


def _logits(q_bkqe: jax.Array, keys_bkxe: jax.Array, seen_btx: jax.Array) -> jax.Array:
    """Returns logits [b, k, q, x], -inf for keys that are not seen; the t axis of `seen` may be 1."""
    logits_bkqx = products.attention_scores(q_bkqe, keys_bkxe) * q_bkqe.shape[-1] ** -0.5
    logits_bkgtx = logits_bkqx.reshape(*q_bkqe.shape[:2], -1, *seen_btx.shape[1:])
    return jnp.where(seen_btx[:, None, None], logits_bkgtx, -jnp.inf).reshape(logits_bkqx.shape)


def _mix(weights_bkqx: jax.Array, values_bkxe: jax.Array) -> jax.Array:
    weights_bkqx, wide = weights_bkqx.astype(values_bkxe.dtype), weights_bkqx.dtype
    return jnp.einsum("bkqx,bkxe->bkqe", weights_bkqx, values_bkxe, preferred_element_type=wide)


TRAINING = ("chunked", *packed_attention.KINDS)  # the first is the plain form of the others; users choose among the rest
IMPLEMENTATIONS: dict[str, Callable[..., jax.Array]] = {
    "xla": _xla,
    **dict.fromkeys(TRAINING, _chunked),
    "streamed": _streamed,
    "pallas-gpu": partial(_pallas, "gpu"),
    "pallas-tpu": partial(_pallas, "tpu"),
}

CHOICES = tuple(name for name in IMPLEMENTATIONS if name not in TRAINING)
