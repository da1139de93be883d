"""Gathers and stores, some in the form that the backend runs fastest.

Shape suffixes: b batch, t positions, n layers, k key/value heads, s cache slots, p new positions, e head dim, d model, x
entries, y picked entries.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


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


def store(slots_bnkse: jax.Array, new_bnkpe: jax.Array, start_b: jax.Array) -> jax.Array:
    """Writes new positions into the slots of a cache's array, from slot `start_b` of each sequence on."""
    if slots_bnkse.shape[0] == 1:  # a plain slice store; the batched form lowers to a scatter
        return lax.dynamic_update_slice_in_dim(slots_bnkse, new_bnkpe, start_b[0], axis=3)
    if slots_bnkse.dtype != jnp.bfloat16:
        return _scatter(slots_bnkse, new_bnkpe, start_b)
    return lax.platform_dependent(slots_bnkse, new_bnkpe, start_b, cpu=_store_by_slot, default=_scatter)


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
