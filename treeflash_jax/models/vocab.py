"""Operations over the vocabulary: embedding, logits and reductions of logits.

If the model axis of the ambient mesh divides the vocabulary, tables and logits stay sharded: each shard searches its part,
and only the candidates are moved. Automatic partitioning would gather full logits for `top_k`, so `top_k` uses `shard_map`.
Sums and maxima are partitioned well automatically.

Shape suffixes: b batch, t positions of a sequence, x positions of one of y chunks, v vocabulary, d model, c candidates;
`...` is any leading axes, batch first.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, PartitionSpec
from jax.typing import DTypeLike

from treeflash_jax.core import sharding
from treeflash_jax.core.dtypes import at_least_float32
from treeflash_jax.models import quantized
from treeflash_jax.models.backend import selection
from treeflash_jax.models.quantized_weight import Quantized

(AXIS,) = sharding.RULES["vocab"]
CHUNK_BYTES = 2**30  # most bytes of logits per device if only their largest entries are used


def embed(table_vd: jax.Array | Quantized, ids: jax.Array, factor: float = 1.0) -> jax.Array:
    """Returns embeddings of tokens, [..., d], times `factor` rounded to their dtype."""
    vectors = _lookup(table_vd, ids)
    return vectors if factor == 1 else vectors * jnp.asarray(factor, vectors.dtype)


def _lookup(table_vd: jax.Array | Quantized, ids: jax.Array) -> jax.Array:
    mesh = _vocab_mesh(table_vd.shape[0])
    if mesh is None:
        return quantized.lookup(table_vd, ids)

    def local(shard_vd: jax.Array | Quantized, ids: jax.Array) -> jax.Array:
        local_ids = ids - lax.axis_index(AXIS) * shard_vd.shape[0]
        is_local = (local_ids >= 0) & (local_ids < shard_vd.shape[0])
        vectors = quantized.lookup(shard_vd, jnp.where(is_local, local_ids, 0))
        return lax.psum(jnp.where(is_local[..., None], vectors, 0), AXIS)

    batch = _batch_spec(mesh, ids.shape)
    return sharding.per_device(local, mesh, (PartitionSpec(AXIS), batch), batch)(table_vd, ids)


def unembed(table_vd: jax.Array | Quantized, hidden: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
    """Returns hidden . table^T: logits [..., v], sharded over the vocabulary if the table is.

    In training, there may be a table for each sequence, [b, v, d]. `dtype` is the dtype of the logits of a single table;
    None: the dtype of `hidden`.
    """
    if len(table_vd.shape) == 3:
        return jax.vmap(partial(quantized.product, "...d,vd->...v"))(hidden, table_vd)
    logits = quantized.product("...d,vd->...v", hidden, table_vd, dtype)
    return sharding.constrain(logits, ("batch",) + (None,) * (logits.ndim - 2) + ("vocab",))


def cap(logits: jax.Array, most: float) -> jax.Array:
    """Returns most * tanh(logits / most), computed in float32 at least; 0: the logits as they are."""
    return (most * jnp.tanh(_wide(logits) / most)).astype(logits.dtype) if most else logits


def top_k(scores: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Returns the k largest entries of [..., v] and their ids: largest first, and lower ids first among equal entries."""
    mesh = _vocab_mesh(scores.shape[-1])
    if mesh is None:
        return selection.top_k(scores, k)

    def local(shard: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, ids = selection.top_k(shard, min(k, shard.shape[-1]))
        ids += lax.axis_index(AXIS) * shard.shape[-1]
        values = lax.all_gather(values, AXIS, axis=values.ndim - 1, tiled=True)
        ids = lax.all_gather(ids, AXIS, axis=ids.ndim - 1, tiled=True)
        values, at = lax.top_k(values, k)
        return values, jnp.take_along_axis(ids, at, axis=-1)

    leading = _batch_spec(mesh, scores.shape[:-1])
    return sharding.per_device(local, mesh, (PartitionSpec(*leading, AXIS),), (leading, leading))(scores)


def argmax(scores: jax.Array) -> jax.Array:
    """Returns the id of the largest entry; the lowest id among equal entries."""
    if _vocab_mesh(scores.shape[-1]) is not None:
        return selection.plain_argmax(scores)
    return selection.argmax(scores)


def take(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns the entries `ids` [..., c] of logits [..., v]. Ids must be at least 0; ids past the vocabulary give -inf."""
    mesh = _vocab_mesh(logits.shape[-1])
    if mesh is None:
        return jnp.take_along_axis(logits, ids, axis=-1, mode="fill", fill_value=-jnp.inf)

    def local(shard: jax.Array, ids: jax.Array) -> jax.Array:
        local_ids = ids - lax.axis_index(AXIS) * shard.shape[-1]
        is_local = (local_ids >= 0) & (local_ids < shard.shape[-1])
        values = jnp.take_along_axis(shard, jnp.where(is_local, local_ids, 0), axis=-1)
        return jnp.where(ids < logits.shape[-1], lax.psum(jnp.where(is_local, values, 0), AXIS), -jnp.inf)

    leading = _batch_spec(mesh, logits.shape[:-1])
    return sharding.per_device(local, mesh, (PartitionSpec(*leading, AXIS), leading), leading)(logits, ids)


def put(scores: jax.Array, ids: jax.Array, values: jax.Array) -> jax.Array:
    """Returns scores [..., v] with the entries `ids` [..., c] replaced. Ids past the vocabulary are ignored.

    If an id occurs twice in a vector, both values must be equal.
    """
    mesh = _vocab_mesh(scores.shape[-1])

    def local(shard: jax.Array, ids: jax.Array, values: jax.Array) -> jax.Array:
        at = ids if mesh is None else ids - lax.axis_index(AXIS) * shard.shape[-1]
        at = jnp.where((at >= 0) & (at < shard.shape[-1]), at, shard.shape[-1])
        replaced = jnp.vectorize(
            lambda x_v, at_c, new_c: x_v.at[at_c].set(new_c, mode="drop"), signature="(v),(c),(c)->(v)"
        )
        return replaced(shard, at, values)

    if mesh is None:
        return local(scores, ids, values)
    leading = _batch_spec(mesh, scores.shape[:-1])
    of_scores, of_ids = PartitionSpec(*leading, AXIS), PartitionSpec(*leading, None)
    return sharding.per_device(local, mesh, (of_scores, of_ids, of_ids), of_scores)(scores, ids, values)


def log_sum_exp(logits: jax.Array) -> jax.Array:
    """Returns log sum exp over the vocabulary, in float32 at least."""
    return jax.nn.logsumexp(_wide(logits), axis=-1)


def top_log_probs(logits: jax.Array, k: int, temperature: jax.Array | float) -> tuple[jax.Array, jax.Array]:
    """Returns the k likeliest tokens of softmax(logits / temperature) and their log-probabilities.

    Log-probabilities are normalised over the whole vocabulary, so the k probabilities sum to less than one. No entry is
    above 0, not even by rounding, since the sum contains exp(0). Trees rely on this: no child may score above its parent.
    """
    values, ids = top_k(logits, k)
    peak = values[..., :1]  # the largest value is the peak: saves a pass over the logits, and a collective
    total = jnp.sum(jnp.exp((_wide(logits) - peak) / temperature), axis=-1, keepdims=True)
    return ids, (_wide(values) - peak) / temperature - jnp.log(total)


def likeliest(
    table_vd: jax.Array | Quantized,
    hidden_btd: jax.Array,
    k: int,
    temperature_b: jax.Array,
    ids_v: jax.Array | None = None,
    logit_cap: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Returns the k likeliest tokens after each hidden state and their log-probabilities, [b, t, k] each.

    Computes `unembed`, `cap` and `top_log_probs`, over at most CHUNK_BYTES of logits at a time. `ids_v` maps a draft
    vocabulary to the verifier's ids; None: the table has the verifier's vocabulary.
    """

    def chunk_log_probs(hidden_bxd: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits_bxv = cap(unembed(table_vd, hidden_bxd), logit_cap)
        ids_bxk, log_probs_bxk = top_log_probs(logits_bxv, k, temperature_b[:, None, None])
        return ids_bxk if ids_v is None else ids_v[ids_bxk], log_probs_bxk

    return by_chunks(chunk_log_probs, table_vd.shape[0], hidden_btd)


def by_chunks(reduce: Callable[..., Any], size: int, hidden_btd: jax.Array, *more: jax.Array) -> Any:
    """Returns `reduce(hidden_btd, *more)`. Computes it over at most CHUNK_BYTES of its largest array at a time.

    Args:
      reduce: function of hidden states and other arrays with the same positions. Its results must have the same positions,
        too.
      size: numbers per position in the largest array that `reduce` makes, such as the size of the vocabulary.
    """
    batch, positions = hidden_btd.shape[:2]
    mesh = sharding.current()
    needed = batch * positions * size * hidden_btd.dtype.itemsize // (1 if mesh is None else mesh.size)
    chunks = min(positions, -(-needed // CHUNK_BYTES))
    if chunks == 1:
        return reduce(hidden_btd, *more)
    each = -(-positions // chunks)

    def split(x_bt: jax.Array) -> jax.Array:
        padded = jnp.pad(x_bt, ((0, 0), (0, chunks * each - positions), *((0, 0),) * (x_bt.ndim - 2)))
        return jnp.moveaxis(padded.reshape(batch, chunks, each, *x_bt.shape[2:]), 1, 0)

    by_chunk = lax.map(lambda arrays: reduce(*arrays), tuple(map(split, (hidden_btd, *more))))
    return jax.tree.map(
        lambda x_ybx: jnp.moveaxis(x_ybx, 0, 1).reshape(batch, -1, *x_ybx.shape[3:])[:, :positions], by_chunk
    )


def gumbel(keys: jax.Array, size: int, dtype: DTypeLike) -> jax.Array:
    """Draws standard Gumbel noise [..., v], independent for each key."""
    noise = jnp.vectorize(lambda key: jax.random.gumbel(key, (size,), dtype), signature="()->(v)")(keys)
    return sharding.constrain(noise, ("batch",) + (None,) * (noise.ndim - 2) + ("vocab",))


def filter_threshold(
    logits: jax.Array,
    temperature: jax.Array | float,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array | float = 0.0,
) -> jax.Array:
    """Returns the smallest logit that survives top-k, top-p and min-p of softmax(logits / temperature), [...].

    The order is as in transformers: top-p counts only tokens that top-k keeps. (vLLM applies min-p before both.) Tokens
    with smaller logits are dropped. Ties are kept, and so is the token that crosses p; -inf keeps all tokens.

    The cuts of top-k and top-p are found by bisection over the ordered bit patterns of the logits' dtype, with 16 passes
    each for bfloat16. This is exact. It neither sorts the vocabulary nor writes an array of its size, and it needs only
    sums, so a sharded vocabulary is never moved. The cut of min-p depends only on the largest logit.

    Args:
      temperature: number above 0. Like top_k (0 keeps all), top_p (1 keeps all) and min_p (0 keeps all), it can be
        broadcast to [...].
    """
    lowest = ordered(jnp.asarray(-jnp.inf, logits.dtype))
    peak = jnp.max(logits, axis=-1, keepdims=True)
    least = _wide(peak[..., 0]) + temperature * jnp.log(min_p)
    temperature = jnp.asarray(temperature, _wide(logits[..., 0]).dtype)[..., None]

    def at_least(cut: jax.Array) -> jax.Array:
        return ordered(logits) >= cut[..., None]

    def mass(cut: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(at_least(cut), jnp.exp((_wide(logits) - _wide(peak)) / temperature), 0), axis=-1)

    kth = _bisect(lambda cut: jnp.sum(at_least(cut), axis=-1) >= top_k, logits)
    kth = jnp.where(top_k > 0, kth, lowest)
    kept_mass = top_p * mass(kth)
    crossing = _bisect(lambda cut: mass(cut) >= kept_mass, logits)
    crossing = jnp.minimum(crossing, ordered(peak[..., 0]))  # if p is below the smallest float, keeps the likeliest token
    kept = jnp.where(top_p < 1, jnp.maximum(kth, crossing), kth)
    rounded = least.astype(logits.dtype)
    return unordered(jnp.maximum(kept, ordered(rounded) + (rounded < least)), logits.dtype)  # rounds `least` up


def _bisect(holds: Callable[[jax.Array], jax.Array], logits: jax.Array) -> jax.Array:
    """Returns the largest key of the logits' dtype for which `holds` is true, [...]. It is true below, and false above."""

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]):
        low, high = bounds  # holds(low) is true, holds(high) is false
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        true = holds(middle)
        return jnp.where(true, middle, low), jnp.where(true, high, middle)

    bounds = [ordered(jnp.asarray(end, logits.dtype)) for end in (-jnp.inf, jnp.inf)]
    low = jnp.broadcast_to(bounds[0], logits.shape[:-1])
    high = jnp.broadcast_to(bounds[1] + 1, logits.shape[:-1])
    return lax.fori_loop(0, 8 * logits.dtype.itemsize, halve, (low, high))[0]


def ordered(x: jax.Array) -> jax.Array:
    """Returns integer keys in the order of the floating-point values; int32 even for 16 bits."""
    bits = lax.bitcast_convert_type(x, f"int{8 * x.dtype.itemsize}")
    bits = bits.astype(jnp.promote_types(bits.dtype, jnp.int32))
    return jnp.where(bits < 0, -(2 ** (8 * x.dtype.itemsize - 1)) - bits, bits)


def unordered(key: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns the floating-point values of keys from `ordered`."""
    size = 8 * jnp.dtype(dtype).itemsize
    bits = jnp.where(key < 0, -(2 ** (size - 1)) - key, key).astype(f"int{size}")
    return lax.bitcast_convert_type(bits, dtype)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(at_least_float32(x.dtype))


def _vocab_mesh(size: int) -> AbstractMesh | None:
    """Returns the ambient mesh if its model axis splits a vocabulary of this size, else None."""
    mesh = sharding.current()
    num_shards = 1 if mesh is None else dict(mesh.shape).get(AXIS, 1)
    return mesh if num_shards > 1 and size % num_shards == 0 else None


def _batch_spec(mesh: AbstractMesh, shape: tuple[int, ...]) -> PartitionSpec:
    return sharding.partition(("batch",) + (None,) * (len(shape) - 1), shape, mesh)
