"""Attention of new positions over a cached prefix and over each other, in one softmax.

Every new position sees the whole committed prefix, and the new positions that its mask allows. These are its ancestors in a
draft tree, earlier positions in a prefill chunk, all positions of a drafter's block, and only itself in a one-token step.
No mask [new, context] is stored.

- "xla", the plain variant, reads the whole capacity of the cache.
- "streamed" and "blocked" read the cache block by block, up to the longest prefix, and keep the logits of a single block.
  Blocks are quarters of the cache ("streamed", for CPUs) or large ("blocked").
- Other names are kernels. They read each prefix block by block with an online softmax. "xla" runs for operands that a
  kernel does not take.

Layers with a window are computed as by "xla", whatever the name. In a ring, all slots are read. In a whole cache, only the
slots of the window are read; but under the name "xla", all slots are read and masked. For packed sequences in training, see
`packed_attention`.

Shape suffixes: b batch, t new positions (queries), u new positions (keys), n layers of an array, s cache slots, x keys of
either kind, h query heads, k key/value heads, g = h / k, q = g t queries of one key/value head, y shares of the prefix,
e head dim.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from treeflash_jax.core import sharding
from treeflash_jax.core.dtypes import at_least_float32
from treeflash_jax.models import kernels, kv_cache
from treeflash_jax.models.backend import products
from treeflash_jax.models.kv_cache import LayerKV

QUARTERS = 4  # blocks of "streamed"
SHORT, SHORT_FOR_ONE_QUERY = 384, 2048  # caches with fewer slots are read without loops, which compiles faster
FEWEST_QUERIES = 256  # fewest queries per key/value head of a part, if queries are split into parts
BLOCK = 8192  # most slots that "blocked" reads at a time


class Operands(NamedTuple):
    """Operands of an implementation: arguments of `tree_attention`."""

    q_bthe: jax.Array
    k_buke: jax.Array
    v_buke: jax.Array
    mask_btu: jax.Array
    sinks_h: jax.Array | None
    first_bt: jax.Array | None
    prefix: LayerKV | None
    length_b: jax.Array | None


def tree_attention(
    q_bthe: jax.Array,
    k_buke: jax.Array,
    v_buke: jax.Array,
    mask_btu: jax.Array,
    prefix: LayerKV | None = None,
    length_b: jax.Array | None = None,
    *,
    first_bt: jax.Array | None = None,
    window: int | None = None,
    sinks_h: jax.Array | None = None,
    implementation: str = "xla",
) -> jax.Array:
    """Computes softmax(q [K_prefix; K_new]^T / sqrt(e)) [V_prefix; V_new] over `length_b` positions of the prefix.

    Returns [b, t, h, e] in the dtype of the queries; the softmax is in float32 at least.

    Args:
      q_bthe, k_buke, v_buke: queries, keys and values of the new positions.
      mask_btu: True if new position t sees new position u. Every position must see itself.
      prefix: committed keys and values; `LayerKV.positions` says which position is in which slot. None: no prefix.
      length_b: number of committed positions per sequence.
      first_bt: first position of the prefix that each new position sees (sliding windows); None: all. Required for rings.
      window: largest number of positions before `length_b` that a new position sees; None: unknown, so all are read.
      sinks_h: one more logit in the softmax of each head; its weight is dropped. None: no sinks.
      implementation: a name in IMPLEMENTATIONS.
    """
    operands = Operands(q_bthe, k_buke, v_buke, mask_btu, sinks_h, first_bt, prefix, length_b)
    if prefix is None:
        return attend_plainly(operands)
    if first_bt is not None:
        if window is None or window >= prefix.num_slots or implementation == "xla":
            return attend_plainly(operands)
        return on_each_device(partial(_windowed, window=window), operands)
    attend = PLAIN.get(implementation) or kernels.find("attention", operands, name=implementation) or attend_plainly
    return attend(operands)


def attend_plainly(operands: Operands) -> jax.Array:
    """Returns attention as "xla" computes it."""
    q_bthe = operands.q_bthe
    slots = 0 if operands.prefix is None else operands.prefix.num_slots
    size = q_bthe[..., 0].size * slots * at_least_float32(q_bthe.dtype).itemsize
    queries = q_bthe.shape[1] * q_bthe.shape[2] // operands.k_buke.shape[2]

    def attend(q_bthe: jax.Array, sequences: slice, positions: slice) -> jax.Array:
        is_sliced = q_bthe.shape[0] < operands.q_bthe.shape[0]
        return _attend(_cut(operands, sequences, positions)._replace(q_bthe=q_bthe), in_one=not is_sliced)

    return products.in_parts(attend, q_bthe, size, most=queries // FEWEST_QUERIES)


def _cut(operands: Operands, sequences: slice, positions: slice) -> Operands:
    """Returns the operands of some sequences, with some positions as queries."""
    q_bthe, k_buke, v_buke, mask_btu, sinks_h, first_bt, prefix, length_b = operands
    if prefix is not None:
        stacks = prefix.keys_bnkse[sequences], prefix.values_bnkse[sequences]
        prefix = LayerKV(*stacks, prefix.layer, prefix.is_ring)
        length_b = length_b[sequences]
    cut = sequences, positions
    return Operands(
        q_bthe[cut], k_buke[sequences], v_buke[sequences], mask_btu[cut], sinks_h,
        None if first_bt is None else first_bt[cut], prefix, length_b,
    )  # fmt: skip


def _attend(operands: Operands, *, in_one: bool) -> jax.Array:
    q_bthe, k_buke, v_buke, mask_btu, sinks_h, first_bt, prefix, length_b = operands
    batch, queries = q_bthe.shape[:2]
    q_bkqe, k_bkue, v_bkue = group_queries(q_bthe, k_buke.shape[2]), jnp.swapaxes(k_buke, 1, 2), jnp.swapaxes(v_buke, 1, 2)
    new_bkqu = logits(q_bkqe, k_bkue, mask_btu)
    peak_bkq1 = jnp.max(new_bkqu, axis=-1, keepdims=True)
    if prefix is not None:
        keys_bkse, values_bkse = prefix.read()
        at_bs = prefix.positions(length_b)
        seen_bts = jnp.broadcast_to((at_bs < length_b[:, None])[:, None], (batch, queries, at_bs.shape[1]))
        if first_bt is not None:
            seen_bts &= at_bs[:, None] >= first_bt[..., None]
        past_bkqs = logits(q_bkqe, keys_bkse, seen_bts)
        peak_bkq1 = jnp.maximum(peak_bkq1, products.largest(past_bkqs)[..., None])

    mixed_bkqe, total_bkq = products.attention_sums(jnp.exp(new_bkqu - peak_bkq1), v_bkue, in_one=in_one)
    if prefix is not None:
        past_bkqe, past_bkq = products.attention_sums(jnp.exp(past_bkqs - peak_bkq1), values_bkse, in_one=in_one)
        mixed_bkqe, total_bkq = mixed_bkqe + past_bkqe, total_bkq + past_bkq
    return divide(mixed_bkqe, total_bkq[..., None], peak_bkq1, sinks_h, q_bthe)


def _windowed(operands: Operands, window: int) -> jax.Array:
    """Runs `attend_plainly` on the last `window` slots of each sequence; on its first slots if the sequence is shorter."""
    prefix, length_b = operands.prefix, operands.length_b
    start_b = jnp.maximum(length_b - window, 0)
    first_bt = operands.first_bt - start_b[:, None]
    return attend_plainly(
        operands._replace(first_bt=first_bt, prefix=prefix.copy(start_b, window), length_b=length_b - start_b)
    )


def _streamed(operands: Operands) -> jax.Array:
    """Reads the quarters of the cache that hold the longest prefix. Reads a short cache as "xla" does."""
    slots = operands.prefix.num_slots
    is_short = slots < (SHORT_FOR_ONE_QUERY if operands.q_bthe.shape[1] == 1 else SHORT)
    return attend_plainly(operands) if is_short else _in_blocks(operands, QUARTERS)


def _blocked(operands: Operands) -> jax.Array:
    """Reads the blocks of at most BLOCK slots that hold the longest prefix."""
    slots = operands.prefix.num_slots
    return attend_plainly(operands) if slots <= BLOCK else _in_blocks(operands, -(-slots // BLOCK))


def _in_blocks(operands: Operands, least_blocks: int) -> jax.Array:
    """Adds up the cache block by block with an online softmax, up to the longest prefix.

    All blocks have the same size. Their number is `least_blocks`, or the next larger number that divides the slots.
    """
    slots = operands.prefix.num_slots
    size = slots // next(blocks for blocks in count(least_blocks) if slots % blocks == 0)

    def attend(operands: Operands) -> jax.Array:
        q_bthe, k_buke, v_buke, mask_btu, sinks_h, _, prefix, length_b = operands
        q_bkqe = group_queries(q_bthe, k_buke.shape[2])
        seen_bs = jnp.arange(slots) < length_b[:, None]
        new_bkqu = logits(q_bkqe, jnp.swapaxes(k_buke, 1, 2), mask_btu)
        peak_bkq = jnp.max(new_bkqu, axis=-1)
        new_bkqu = jnp.exp(new_bkqu - peak_bkq[..., None])
        sums = *products.attention_sums(new_bkqu, jnp.swapaxes(v_buke, 1, 2)), peak_bkq

        def add_block(index: jax.Array, sums: tuple[jax.Array, ...]):
            mixed_bkqe, total_bkq, before_bkq = sums
            keys_bkxe, values_bkxe = prefix.read(index * size, size)
            seen_bx = lax.dynamic_slice_in_dim(seen_bs, index * size, size, axis=1, allow_negative_indices=False)
            past_bkqx = logits(q_bkqe, keys_bkxe, seen_bx[:, None])
            peak_bkq = jnp.maximum(before_bkq, jnp.max(past_bkqx, axis=-1))
            past_bkqx, kept_bkq = jnp.exp(past_bkqx - peak_bkq[..., None]), jnp.exp(before_bkq - peak_bkq)
            past_bkqe, past_bkq = products.attention_sums(past_bkqx, values_bkxe)
            return mixed_bkqe * kept_bkq[..., None] + past_bkqe, total_bkq * kept_bkq + past_bkq, peak_bkq

        blocks = (jnp.max(length_b) + (size - 1)) // size
        mixed_bkqe, total_bkq, peak_bkq = lax.fori_loop(0, blocks, add_block, sums)
        return divide(mixed_bkqe, total_bkq[..., None], peak_bkq[..., None], sinks_h, q_bthe)

    return on_each_device(attend, operands)


def on_each_device(attend: Callable[[Operands], jax.Array], operands: Operands) -> jax.Array:
    """Runs `attend` on every device of a mesh, for the device's sequences and heads. No device waits for another.

    Query heads are on the device of their key/value head. If the model axis does not divide the number of key/value heads,
    all devices along that axis do the same work.
    """
    *arrays, prefix, length_b = operands
    kv_shape = operands.k_buke.shape
    heads, batch = (("batch", None, "kv_heads", None), kv_shape), (("batch",), length_b.shape)
    layouts = heads, heads, heads, batch, (("kv_heads",), kv_shape[2:3]), batch
    return over_mesh(lambda *parts: attend(Operands(*parts)), arrays, layouts, prefix, length_b)


def over_mesh(attend: Callable, arrays: Sequence[Any], layouts: Sequence[Any], prefix: LayerKV, length_b: jax.Array) -> Any:
    """Runs `attend(*arrays, prefix, length_b)` on every device of a mesh, for the device's sequences and heads.

    The prefix is passed in parts: its arrays are split over the mesh, but the index of its layer is the same on all
    devices.
    """

    def run(*arrays: Any) -> Any:
        *arrays, stacks, layer, length_b = arrays
        return attend(*arrays, LayerKV(*stacks, layer, prefix.is_ring), length_b)

    stacks = prefix.keys_bnkse, prefix.values_bnkse
    layouts = *layouts, (kv_cache.AXES, prefix.keys_bnkse.shape), ((), ()), (("batch",), length_b.shape)
    return sharding.over_mesh(run, (*arrays, stacks, prefix.layer, length_b), layouts)


def group_queries(q_bthe: jax.Array, kv_heads: int) -> jax.Array:
    """Returns the queries by key/value head, [b, k, q, e].

    So products are plain batched products, and no array as large as the logits is transposed.
    """
    batch, queries, _, head_dim = q_bthe.shape
    q_bkgte = jnp.moveaxis(q_bthe.reshape(batch, queries, kv_heads, -1, head_dim), 1, 3)
    return q_bkgte.reshape(batch, kv_heads, -1, head_dim)


def _ungroup_queries(mixed_bkqe: jax.Array, q_bthe: jax.Array) -> jax.Array:
    """Returns attention outputs in the layout and dtype of the queries."""
    batch, queries, _, head_dim = q_bthe.shape
    mixed_bkgte = mixed_bkqe.reshape(batch, mixed_bkqe.shape[1], -1, queries, head_dim)
    return jnp.moveaxis(mixed_bkgte, 3, 1).reshape(q_bthe.shape).astype(q_bthe.dtype)


def divide(
    mixed_bkqe: jax.Array, total_bkq1: jax.Array, peak_bkq1: jax.Array, sinks_h: jax.Array | None, q_bthe: jax.Array
) -> jax.Array:
    """Returns sums of exp(l - peak) v divided by sums of exp(l - peak), including sinks, in the layout of the queries."""
    if sinks_h is not None:
        sinks_kq1 = jnp.repeat(sinks_h.astype(peak_bkq1.dtype), q_bthe.shape[1]).reshape(peak_bkq1.shape[1:])
        total_bkq1 += jnp.exp(sinks_kq1 - peak_bkq1)
    return _ungroup_queries(mixed_bkqe / total_bkq1, q_bthe)


def logits(q_bkqe: jax.Array, keys_bkxe: jax.Array, seen_btx: jax.Array) -> jax.Array:
    """Returns logits [b, k, q, x], with -inf for keys that a query does not see. The t axis of `seen` may have size 1."""
    logits_bkqx = products.attention_scores(q_bkqe, keys_bkxe) * q_bkqe.shape[-1] ** -0.5
    logits_bkgtx = logits_bkqx.reshape(*q_bkqe.shape[:2], -1, *seen_btx.shape[1:])
    return jnp.where(seen_btx[:, None, None], logits_bkgtx, -jnp.inf).reshape(logits_bkqx.shape)


PLAIN: dict[str, Callable[[Operands], jax.Array]] = {"xla": attend_plainly, "streamed": _streamed, "blocked": _blocked}
IMPLEMENTATIONS = (*PLAIN, *kernels.KERNELS["attention"])
