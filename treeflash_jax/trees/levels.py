"""Loops over the levels of a tree, and top-k with a fixed order of equals.

Shape suffixes: b batch, x candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from treeflash_jax import mesh as meshes


def over_depths(level: Callable, start: Any, depths: range, goes_on: Callable | None = None) -> tuple[Any, Any]:
    """`lax.scan` of a builder's levels: a loop on a CPU, where that is faster, and unrolled elsewhere.

    Best-first search launches ten kernels a level in a loop on a GPU, and three without one.

    Args:
      level: (carry, depth) -> (carry, what is stacked over the depths).
      start: the first carry.
      depths: of the levels; static.
      goes_on: whether levels below a carry matter; where not, a loop ends and what is stacked of them is 0.
    """

    rows = jax.eval_shape(level, start, jnp.int32(depths.start))[1]
    nothing = jax.tree.map(lambda row: jnp.zeros((len(depths), *row.shape), row.dtype), rows)
    if not depths:
        return start, nothing

    def loop(start: Any) -> tuple[Any, Any]:
        def body(now: Any) -> Any:
            depth, carry, stacked = now
            carry, row = level(carry, depth)
            put = partial(lax.dynamic_update_index_in_dim, index=depth - depths.start, axis=0)
            return depth + 1, carry, jax.tree.map(put, stacked, row)

        def is_on(now: Any) -> jax.Array:
            return (now[0] < depths.stop) & (True if goes_on is None else goes_on(now[1]))

        return lax.while_loop(is_on, body, (jnp.int32(depths.start), start, nothing))[1:]

    unrolled = partial(lax.scan, level, xs=np.arange(depths.start, depths.stop, dtype=np.int32), unroll=True)
    return lax.platform_dependent(start, cpu=loop, default=unrolled)


def stable_top_k(scores_bx: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """`lax.top_k`, the lower index first among equals: so XLA does it on a CPU, elsewhere it takes a stable sort.

    On a mesh every device sorts the rows of its own sequences.
    """

    def by_sort(scores_bx: jax.Array) -> list[jax.Array]:
        order_bx = lax.broadcasted_iota(jnp.int32, scores_bx.shape, 1)
        cost_bx, order_bx = lax.sort((-scores_bx, order_bx), num_keys=1, is_stable=True)
        return [-cost_bx[:, :k], order_bx[:, :k]]

    def best(scores_bx: jax.Array) -> list[jax.Array]:
        return lax.platform_dependent(scores_bx, cpu=lambda scores_bx: lax.top_k(scores_bx, k), default=by_sort)

    return meshes.by_rows(best, scores_bx)
