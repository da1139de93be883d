"""Everything over the vocabulary: embedding, logits, and every reduction of a row of logits.

With an ambient mesh whose model axis divides the vocabulary, tables and logits stay sharded: a shard finds its own
candidates and only those travel. Automatic partitioning would gather full logits for `top_k`, so that goes through
`shard_map`; sums and maxima partition well by themselves.

Shape suffixes: b batch, r rows of a sequence, x rows of one of y chunks, v vocabulary, d model, c candidates; `...` is any
leading axes, batch first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from treeflash_jax import mesh as meshes
from treeflash_jax import quantized
from treeflash_jax.quantized import Quantized

(AXIS,) = meshes.RULES["vocab"]
CHUNK_BYTES = 2**30  # of logits on a device, at most, where only their largest entries are wanted
GROUP = 128  # tokens of a group in `top_k` of long rows: the lanes of a TPU, where other sizes would be padded


def embed(table_vd: jax.Array | Quantized, ids: jax.Array) -> jax.Array:
    """Rows of the embedding table, [..., d]."""
    mesh = _vocab_mesh(table_vd.shape[0])
    if mesh is None:
        return quantized.rows(table_vd, ids)

    def local(shard_vd: jax.Array | Quantized, ids: jax.Array) -> jax.Array:
        local_ids = ids - lax.axis_index(AXIS) * shard_vd.shape[0]
        mine = (local_ids >= 0) & (local_ids < shard_vd.shape[0])
        rows = quantized.rows(shard_vd, jnp.where(mine, local_ids, 0))
        return lax.psum(jnp.where(mine[..., None], rows, 0), AXIS)

    batch = _batch_spec(mesh, ids.shape)
    return _manual(local, mesh, (PartitionSpec(AXIS), batch), batch)(table_vd, ids)


def unembed(table_vd: jax.Array | Quantized, hidden: jax.Array) -> jax.Array:
    """hidden . table^T: logits [..., v], sharded over the vocabulary where the table is.

    Args:
      table_vd: of all sequences; or [b, v, d], one for each.
      hidden: [b, ..., d].
    """
    if len(table_vd.shape) == 3:
        return jax.vmap(partial(quantized.product, "...d,vd->...v"))(hidden, table_vd)
    logits = quantized.product("...d,vd->...v", hidden, table_vd)
    return meshes.constrain(logits, ("batch",) + (None,) * (logits.ndim - 2) + ("vocab",))


def top_k(scores: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest entries of each row and their ids, largest first, lower id first among equals."""
    mesh = _vocab_mesh(scores.shape[-1])
    if mesh is None:
        return local_top_k(scores, k)

    def local(shard: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, ids = local_top_k(shard, min(k, shard.shape[-1]))
        ids += lax.axis_index(AXIS) * shard.shape[-1]
        values = lax.all_gather(values, AXIS, axis=values.ndim - 1, tiled=True)
        ids = lax.all_gather(ids, AXIS, axis=ids.ndim - 1, tiled=True)
        values, at = lax.top_k(values, k)
        return values, jnp.take_along_axis(ids, at, axis=-1)

    rows = _batch_spec(mesh, scores.shape[:-1])
    return _manual(local, mesh, (PartitionSpec(*rows, AXIS),), (rows, rows))(scores)


def local_top_k(scores: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """`top_k` of rows that every device holds whole."""
    rows = scores.reshape(-1, scores.shape[-1])
    values, ids = _grouped_top_k(rows, k) if _is_grouped(rows.shape[1], k) else _plain_top_k(rows, k)
    return values.reshape(*scores.shape[:-1], k), ids.reshape(*scores.shape[:-1], k)


def _plain_top_k(rows_rv: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """`lax.top_k`. XLA's CPU backend sorts rows in full unless they are those of a float32 matrix (25 x slower at 4096)."""

    def by_float32(rows_rv: jax.Array) -> list[jax.Array]:
        values_rk, ids_rk = lax.top_k(_wide(rows_rv), k)
        return [values_rk.astype(rows_rv.dtype), ids_rk]

    return lax.platform_dependent(rows_rv, cpu=by_float32, default=lambda rows_rv: lax.top_k(rows_rv, k))


def _is_grouped(size: int, k: int) -> bool:
    """Whether rows are long enough for the largest entries of groups to be worth finding first."""
    return size % GROUP == 0 and size >= 8 * k * GROUP


def _grouped_top_k(rows_rv: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """`lax.top_k` of long rows: the k groups of tokens with the largest maxima hold the k largest entries.

    Also among equals: a group left out is beaten by k groups that have a larger maximum, or the same at lower ids. What is
    sorted is v / GROUP maxima and k GROUP entries instead of v.
    """
    groups_rgs = rows_rv.reshape(rows_rv.shape[0], -1, GROUP)
    at_rk = jnp.sort(_plain_top_k(jnp.max(groups_rgs, axis=-1), k)[1], axis=-1)
    few_rx = jnp.take_along_axis(groups_rgs, at_rk[..., None], axis=1).reshape(rows_rv.shape[0], -1)
    values_rk, place_rk = _plain_top_k(few_rx, k)
    return values_rk, jnp.take_along_axis(at_rk, place_rk // GROUP, axis=1) * GROUP + place_rk % GROUP


def argmax(scores: jax.Array) -> jax.Array:
    """The id of each row's largest entry, the lowest among equals."""
    if not _is_grouped(scores.shape[-1], 1) or _vocab_mesh(scores.shape[-1]) is not None:
        return _argmax(scores)
    return lax.platform_dependent(scores, cpu=_grouped_argmax, default=_argmax)


def _argmax(scores: jax.Array) -> jax.Array:
    """Two plain reductions: they vectorise (8 x `jnp.argmax` on a CPU) and partition over a sharded vocabulary alone."""
    ids = lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    is_peak = scores == jnp.max(scores, axis=-1, keepdims=True)
    return jnp.min(jnp.where(is_peak, ids, scores.shape[-1]), axis=-1)


def _grouped_argmax(scores: jax.Array) -> jax.Array:
    """The first group of tokens with the largest maximum, and the place there: of three arrays as long as the rows that a
    CPU writes for two reductions only the scores are left. A GPU writes none of them for two, and the scores for this.
    """
    groups = scores.reshape(*scores.shape[:-1], -1, GROUP)
    at = _argmax(jnp.max(groups, axis=-1))
    group = jnp.take_along_axis(groups, at[..., None, None], axis=-2)[..., 0, :]
    return at * GROUP + _argmax(group)


def take(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """Entries `ids` [..., c] of each row, ids at least 0; -inf for ids past the vocabulary."""
    mesh = _vocab_mesh(logits.shape[-1])
    if mesh is None:
        return jnp.take_along_axis(logits, ids, axis=-1, mode="fill", fill_value=-jnp.inf)

    def local(shard: jax.Array, ids: jax.Array) -> jax.Array:
        local_ids = ids - lax.axis_index(AXIS) * shard.shape[-1]
        mine = (local_ids >= 0) & (local_ids < shard.shape[-1])
        values = jnp.take_along_axis(shard, jnp.where(mine, local_ids, 0), axis=-1)
        return jnp.where(ids < logits.shape[-1], lax.psum(jnp.where(mine, values, 0), AXIS), -jnp.inf)

    rows = _batch_spec(mesh, logits.shape[:-1])
    return _manual(local, mesh, (PartitionSpec(*rows, AXIS), rows), rows)(logits, ids)


def put(rows: jax.Array, ids: jax.Array, values: jax.Array) -> jax.Array:
    """Rows [b, v] with entries `ids` [b, c] replaced; ids of a row are distinct, those past the vocabulary are dropped."""
    mesh = _vocab_mesh(rows.shape[-1])

    def local(shard: jax.Array, ids: jax.Array, values: jax.Array) -> jax.Array:
        at = ids if mesh is None else ids - lax.axis_index(AXIS) * shard.shape[-1]
        at = jnp.where((at >= 0) & (at < shard.shape[-1]), at, shard.shape[-1])
        return jax.vmap(lambda row, at, values: row.at[at].set(values, mode="drop"))(shard, at, values)

    if mesh is None:
        return local(rows, ids, values)
    batch = _batch_spec(mesh, rows.shape[:-1])
    few = PartitionSpec(*batch, None)
    return _manual(local, mesh, (PartitionSpec(*batch, AXIS), few, few), PartitionSpec(*batch, AXIS))(rows, ids, values)


def log_sum_exp(logits: jax.Array) -> jax.Array:
    """log sum exp of each row, in float32 at least."""
    return jax.nn.logsumexp(_wide(logits), axis=-1)


def top_log_probs(logits: jax.Array, k: int, temperature: jax.Array | float) -> tuple[jax.Array, jax.Array]:
    """The k likeliest tokens of softmax(logits / temperature) and their log-probabilities.

    Normalised over the whole vocabulary, so that the k entries sum to less than one. Trees rely on no child outscoring its
    parent: no entry is above 0, not even by a rounding, since the sum holds exp(0).
    """
    values, ids = top_k(logits, k)
    peak = values[..., :1]  # saves a pass over the logits, and a collective
    total = jnp.sum(jnp.exp((_wide(logits) - peak) / temperature), axis=-1, keepdims=True)
    return ids, (_wide(values) - peak) / temperature - jnp.log(total)


def likeliest(
    table_vd: jax.Array | Quantized, hidden_brd: jax.Array, k: int, temperature_b: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The k likeliest tokens after each row of hidden states, and their log-probabilities, [b, r, k] each.

    `top_log_probs` of `unembed`, over no more rows at a time than CHUNK_BYTES of logits take.
    """
    batch, rows = hidden_brd.shape[:2]
    mesh = meshes.current()
    size = batch * rows * table_vd.shape[0] * hidden_brd.dtype.itemsize // (1 if mesh is None else mesh.size)
    chunks = min(rows, -(-size // CHUNK_BYTES))

    def likeliest_of(hidden_bxd: jax.Array) -> tuple[jax.Array, jax.Array]:
        return top_log_probs(unembed(table_vd, hidden_bxd), k, temperature_b[:, None, None])

    if chunks == 1:
        return likeliest_of(hidden_brd)
    each = -(-rows // chunks)
    hidden_brd = jnp.pad(hidden_brd, ((0, 0), (0, chunks * each - rows), (0, 0)))
    found = lax.map(likeliest_of, jnp.moveaxis(hidden_brd.reshape(batch, chunks, each, -1), 1, 0))
    ids_brk, log_probs_brk = (jnp.moveaxis(x_ybxk, 0, 1).reshape(batch, -1, k)[:, :rows] for x_ybxk in found)
    return ids_brk, log_probs_brk


def gumbel(keys: jax.Array, size: int, dtype) -> jax.Array:
    """Standard Gumbel noise [..., v], one independent row per key."""
    draw = lambda key: jax.random.gumbel(key, (size,), dtype)  # noqa: E731
    for _ in range(keys.ndim):
        draw = jax.vmap(draw)
    noise = draw(keys)
    return meshes.constrain(noise, ("batch",) + (None,) * (noise.ndim - 2) + ("vocab",))


def filter_threshold(logits: jax.Array, temperature: jax.Array | float, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """The smallest logit that survives top-k, then top-p of softmax(logits / temperature), per row.

    A token is kept iff its logit is not below: ties are kept, and so is the token that crosses p. Both cuts are found by
    bisection over the ordered bit patterns of the logits' own dtype, 16 passes each for bfloat16: exact, without sorting
    the vocabulary or writing anything of its size, and with sums only, so a sharded vocabulary never moves.

    Args:
      logits: [..., v].
      temperature: above 0, broadcastable to the rows.
      top_k: tokens to keep, broadcastable to the rows; 0 keeps all.
      top_p: probability mass to keep, broadcastable to the rows; 1 keeps all.

    Returns:
      Thresholds [...], in the dtype of the logits; -inf where nothing is cut.
    """
    temperature = jnp.asarray(temperature, _wide(logits[..., 0]).dtype)[..., None]
    lowest = ordered(jnp.asarray(-jnp.inf, logits.dtype))
    peak = jnp.max(logits, axis=-1, keepdims=True)

    def at_least(cut: jax.Array) -> jax.Array:
        return ordered(logits) >= cut[..., None]

    def mass(cut: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(at_least(cut), jnp.exp((_wide(logits) - _wide(peak)) / temperature), 0), axis=-1)

    kth = _bisect(lambda cut: jnp.sum(at_least(cut), axis=-1) >= top_k, logits)
    kth = jnp.where(top_k > 0, kth, lowest)
    wanted = top_p * mass(kth)
    crossing = _bisect(lambda cut: mass(cut) >= wanted, logits)
    crossing = jnp.minimum(crossing, ordered(peak[..., 0]))  # p below the smallest float keeps the likeliest token
    return unordered(jnp.where(top_p < 1, jnp.maximum(kth, crossing), kth), logits.dtype)


def _bisect(holds: Callable[[jax.Array], jax.Array], logits: jax.Array) -> jax.Array:
    """The largest key of a logit's dtype for which `holds` (true below, false above) is true, per row."""

    def halve(_, bounds):
        low, high = bounds  # holds(low) is true, holds(high) is false
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        true = holds(middle)
        return jnp.where(true, middle, low), jnp.where(true, high, middle)

    bounds = [ordered(jnp.asarray(end, logits.dtype)) for end in (-jnp.inf, jnp.inf)]
    low, high = (jnp.broadcast_to(end, logits.shape[:-1]) for end in (bounds[0], bounds[1] + 1))
    return lax.fori_loop(0, 8 * logits.dtype.itemsize, halve, (low, high))[0]


def ordered(x: jax.Array) -> jax.Array:
    """Integer keys in the order of the floating-point values; int32 for 16 bits too."""
    bits = lax.bitcast_convert_type(x, f"int{8 * x.dtype.itemsize}")
    bits = bits.astype(jnp.promote_types(bits.dtype, jnp.int32))
    return jnp.where(bits < 0, -(2 ** (8 * x.dtype.itemsize - 1)) - bits, bits)


def unordered(key: jax.Array, dtype) -> jax.Array:
    size = 8 * jnp.dtype(dtype).itemsize
    bits = jnp.where(key < 0, -(2 ** (size - 1)) - key, key).astype(f"int{size}")
    return lax.bitcast_convert_type(bits, dtype)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _vocab_mesh(size: int):
    """The ambient mesh where its model axis splits a vocabulary of this size; None otherwise."""
    mesh = meshes.current()
    ways = 1 if mesh is None else dict(mesh.shape).get(AXIS, 1)
    return mesh if ways > 1 and size % ways == 0 else None


def _batch_spec(mesh, shape: tuple[int, ...]) -> PartitionSpec:
    return meshes.partition(("batch",) + (None,) * (len(shape) - 1), shape, mesh)


def _manual(local: Callable, mesh, in_specs, out_specs) -> Callable:
    names = set(mesh.axis_names) - meshes.manual_axes(mesh)
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=names, check_vma=False)
