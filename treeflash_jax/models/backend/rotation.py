"""Rotary embedding in the form that the backend runs fastest.

Shape suffixes: b batch, t tokens, h heads, e head dim.
"""

import jax
import jax.numpy as jnp
from jax import lax


def rotate(x_bthe: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the two halves of each head against each other by the position's angle."""
    wide = jnp.promote_types(x_bthe.dtype, jnp.float32)

    def by_halves(x_bthe: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        first, second = jnp.split(x_bthe, 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def by_swap(x_bthe: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """One operation, for accelerators, which would launch one for each half."""
        swapped_bthe = jnp.flip(x_bthe.reshape(*x_bthe.shape[:-1], 2, -1), axis=-2).reshape(x_bthe.shape)
        return x_bthe * jnp.concatenate([cos, cos], axis=-1) + swapped_bthe * jnp.concatenate([-sin, sin], axis=-1)

    arrays = (x.astype(wide) for x in (x_bthe, *table))
    return lax.platform_dependent(*arrays, cpu=by_halves, default=by_swap).astype(x_bthe.dtype)
