"""Rotary embedding in the variant that the backend runs fastest.

Shape suffixes: b batch, t tokens, h heads, e head dim.
"""

import jax
import jax.numpy as jnp
from jax import lax

from treeflash_jax.core.dtypes import at_least_float32


def rotate(x_bthe: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the two halves of each head against each other by the position's angle; see `layers.rotary_table`.

    If the table is for fewer elements, only the first elements of each head are rotated.
    """
    size = table[0].shape[-1]
    if size < x_bthe.shape[-1]:
        return jnp.concatenate([rotate(x_bthe[..., :size], table), x_bthe[..., size:]], axis=-1)
    narrow, wide = x_bthe.dtype, at_least_float32(x_bthe.dtype)

    def by_halves(x_bthe: jax.Array, *table: jax.Array) -> jax.Array:
        (first, second), (cos, sin) = jnp.split(x_bthe, 2, axis=-1), per_pair(table)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def by_swap(x_bthe: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """Rotates in one operation, for accelerators: they would launch an operation for each half."""
        swapped_bthe = jnp.flip(x_bthe.reshape(*x_bthe.shape[:-1], 2, -1), axis=-2).reshape(x_bthe.shape)
        return x_bthe * cos + swapped_bthe * sin

    def by_product(x_bthe: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """Swaps the halves by a product with zeros and ones: for several positions, a TPU is slower at moving halves."""
        swap_ee = jnp.roll(jnp.eye(size, dtype=narrow), size // 2, axis=1)
        swapped_bthe = jnp.einsum("bthe,ez->bthz", x_bthe.astype(narrow), swap_ee, preferred_element_type=wide)
        return x_bthe * cos + swapped_bthe * sin

    variants = {"tpu": by_product} if narrow.itemsize == 2 and x_bthe.shape[1] > 1 else {}
    arrays = (x.astype(wide) for x in (x_bthe, *table))
    return lax.platform_dependent(*arrays, cpu=by_halves, default=by_swap, **variants).astype(narrow)


def per_pair(table: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Returns cosine and sine of every rotated pair, [..., e / 2]."""
    return tuple(x[..., x.shape[-1] // 2 :] for x in table)
