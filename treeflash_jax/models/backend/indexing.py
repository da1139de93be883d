"""Gathers and stores, some in the variant that the backend runs fastest.

Shape suffixes: b batch, t positions, n layers, k key/value heads, s cache slots, p new positions, e head dim, d model, x
entries, y picked entries.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from treeflash_jax.core import sharding

Pair = tuple[jax.Array, jax.Array]  # of keys and of values


@jax.jit
def pick(x_bx: jax.Array, index_by: jax.Array) -> jax.Array:
    """Returns x[b, index[b, y], ...]: gathers along the second axis, per sequence."""
    return jax.vmap(lambda x_x, index_y: x_x[index_y])(x_bx, index_by)


def at_last(x_btd: jax.Array, count_b: jax.Array) -> jax.Array:
    """Returns the entries at position `count_b` - 1, [b, 1, d]; at the first position if `count_b` is 0."""
    return jnp.take_along_axis(x_btd, jnp.maximum(count_b - 1, 0)[:, None, None], axis=1)


def lookup(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns vectors of a table by id, [..., d]."""

    def tied(table: jax.Array, ids: jax.Array) -> jax.Array:
        table, ids = lax.optimization_barrier((table, ids))
        return table[ids]

    if table.dtype != jnp.bfloat16:
        return table[ids]
    # XLA's CPU backend gathers in float32. If the table were not tied to ids, it would be converted whole before a decoding
    # loop.
    return lax.platform_dependent(table, ids, cpu=tied, default=lambda table, ids: table[ids])


def slot_repeater(num_slots: int, times: int) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that keeps the first slot once and repeats each later slot `times` times, from [b, slots, ...].

    It is a gather, except on a CPU: there, it is a repetition, because a fusion that gathers takes twice as long.
    """
    index = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.repeat(jnp.arange(1, num_slots), times)])

    def repeated(slots: jax.Array) -> jax.Array:
        return jnp.concatenate([slots[:, :1], jnp.repeat(slots[:, 1:], times, axis=1)], axis=1)

    return lambda slots: lax.platform_dependent(slots, cpu=repeated, default=lambda slots: slots[:, index])


def store(slots: Pair, new: Pair, start_b: jax.Array) -> Pair:
    """Writes new positions into the slots of a cache's arrays, from slot `start_b` of each sequence on.

    Args:
      slots: arrays of keys and of values, [b, n, k, s, e].
      new: keys and values of the new positions, [b, n, k, p, e].
    """

    def each(write: Callable[..., jax.Array]) -> Callable[..., Pair]:
        return lambda slots, new, start_b: jax.tree.map(lambda x, y: write(x, y, start_b), slots, new)

    if slots[0].shape[0] == 1:  # a plain slice store; the batched variant lowers to a scatter
        return each(lambda x, y, start_b: lax.dynamic_update_slice_in_dim(x, y, start_b[0], axis=3))(slots, new, start_b)
    on_cpu = each(_store_by_slot if slots[0].dtype == jnp.bfloat16 else _scatter)
    return lax.platform_dependent(slots, new, start_b, cpu=on_cpu, tpu=_store_by_sequence, default=each(_scatter))


def _store_by_sequence(slots: Pair, new: Pair, start_b: jax.Array) -> Pair:
    """Stores keys and values of one sequence at a time. XLA for TPUs would make a longer loop of each scatter."""

    def local(slots: Pair, new: Pair, start_b: jax.Array) -> Pair:
        def store_next(b: jax.Array, slots: Pair) -> Pair:
            start = start_b[b].astype(b.dtype)

            def write(slots_bnkse: jax.Array, new_bnkpe: jax.Array) -> jax.Array:
                # The condition always holds. libtpu 0.0.42 fails (RET_CHECK) if the loop copies without any arithmetic.
                new_1nkpe = jnp.where(start >= 0, lax.dynamic_slice_in_dim(new_bnkpe, b, 1), 0)
                return lax.dynamic_update_slice(slots_bnkse, new_1nkpe, (b, 0, 0, start, 0))

            return jax.tree.map(write, slots, new)

        return lax.fori_loop(0, len(start_b), store_next, slots)

    layout = ("batch", None, "kv_heads", None, None), slots[0].shape
    return sharding.over_mesh(local, (slots, new, start_b), (layout, layout, (("batch",), start_b.shape)))


def _scatter(slots_bnkse: jax.Array, new_bnkpe: jax.Array, start_b: jax.Array) -> jax.Array:
    write = jax.vmap(lambda slots_nkse, new_nkpe, at: lax.dynamic_update_slice_in_dim(slots_nkse, new_nkpe, at, axis=2))
    return write(slots_bnkse, new_bnkpe, start_b)


def _store_by_slot(slots_bnkse: jax.Array, new_bnkpe: jax.Array, start_b: jax.Array) -> jax.Array:
    """Chooses the old or the new value of each slot, because XLA:CPU would scatter into a float32 copy of the cache."""
    return select(slots_bnkse, new_bnkpe, jnp.arange(slots_bnkse.shape[3]) - start_b[:, None])


def select(slots_bnkse: jax.Array, new_bnkpe: jax.Array, index_bs: jax.Array) -> jax.Array:
    """Writes into each slot the new position with this index. A slot whose index has no new position stays as it is."""
    width, index_b11s1 = new_bnkpe.shape[3], index_bs[:, None, None, :, None]
    chosen_bnkse = jnp.take_along_axis(new_bnkpe, jnp.clip(index_b11s1, 0, width - 1), axis=3)
    return jnp.where((index_b11s1 >= 0) & (index_b11s1 < width), chosen_bnkse, slots_bnkse)
