"""`over_depths`: a scan over a tree's levels, unrolled except on CPUs, where a loop is faster."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def over_depths(level: Callable, start: Any, depths: range, goes_on: Callable | None = None) -> tuple[Any, Any]:
    """Runs `lax.scan` over the levels of a tree: unrolled, except on a CPU, where a loop is faster.

    On a GPU, best-first search launches ten kernels per level in a loop, and three without one.

    Args:
      level: function (carry, depth) -> (carry, output), as in `lax.scan`.
      depths: depths of the levels; static.
      goes_on: predicate of a carry. The loop may end once it is false; the outputs of further levels are then 0. None: all
        levels run.
    """
    level = jax.jit(level)  # traced once for all uses; XLA inlines the calls
    outputs = jax.eval_shape(level, start, jnp.int32(depths.start))[1]
    zeros = jax.tree.map(lambda output: jnp.zeros((len(depths), *output.shape), output.dtype), outputs)
    if not depths:
        return start, zeros

    def loop(start: Any) -> tuple[Any, Any]:
        def body(now: Any) -> Any:
            depth, carry, stacked = now
            carry, output = level(carry, depth)
            put = partial(lax.dynamic_update_index_in_dim, index=depth - depths.start, axis=0)
            return depth + 1, carry, jax.tree.map(put, stacked, output)

        def is_on(now: Any) -> jax.Array:
            return (now[0] < depths.stop) & (True if goes_on is None else goes_on(now[1]))

        return lax.while_loop(is_on, body, (jnp.int32(depths.start), start, zeros))[1:]

    unrolled = partial(lax.scan, level, xs=np.arange(depths.start, depths.stop, dtype=np.int32), unroll=True)
    return lax.platform_dependent(start, cpu=loop, default=unrolled)
