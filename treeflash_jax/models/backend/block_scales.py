"""The numbers that a weight with blocks represents: its scales, offsets and expanded values.

Products with such weights share two more functions: `einsum` and `count_parts`.

All weights have blocks, and their inputs are in order.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from treeflash_jax.core import sharding
from treeflash_jax.core.dtypes import at_least_float32
from treeflash_jax.models.quantized_weight import Quantized

MIN_PARTS = 4  # fewest parts of a weight that is scaled part by part
MATRIX_UNIT_ROWS = 128  # rows of a TPU's matrix unit
EXACT_IN_BFLOAT16 = ("bfloat16", "float8_e4m3fn", "float8_e8m0fnu", "int8", "uint8")  # dtypes


def widen(weight: Quantized, dtype: DTypeLike) -> jax.Array:
    """Returns the numbers that a weight represents, computed in float32 at least and rounded once."""
    wide = at_least_float32(dtype)
    numbers = weight.values.astype(wide)
    if weight.zero is not None:
        numbers -= _spread(weight.zero, weight.shape, wide)
    numbers *= _spread(weight.scale if weight.outer is None else compute_scales(weight, wide), weight.shape, wide)
    if weight.minimum is not None:
        numbers -= _spread(_compute_minimums(weight, wide), weight.shape, wide)
    return numbers.astype(dtype)


def compute_scales(weight: Quantized, wide: DTypeLike) -> jax.Array:
    """Returns the product of both levels of scales, in the shape of `weight.scale`."""
    scale = weight.scale.astype(wide)
    if weight.outer is None:
        return scale
    outer = repeat(weight.outer.astype(wide), scale.shape)
    return scale / outer if weight.is_divisor else scale * outer


def _compute_minimums(weight: Quantized, wide: DTypeLike) -> jax.Array:
    minimum = weight.minimum.astype(wide)
    if weight.outer_minimum is None:
        return minimum
    return minimum * repeat(weight.outer_minimum.astype(wide), minimum.shape)


def subtract_offsets(
    equation: str, y: jax.Array, x: jax.Array, weight: Quantized, scale: jax.Array, num_groups: int
) -> jax.Array:
    """Subtracts the part of a product of x that is due to zero points and minimums.

    Args:
      equation: einsum of the sums of x over each group, with offsets in the shape of `scale`.
      y: product of x with values times scales.
      scale: result of `compute_scales`.
      num_groups: number of groups of inputs.
    """
    offsets = []
    if weight.zero is not None:
        offsets.append(repeat(weight.zero.astype(scale.dtype), scale.shape) * scale)
    if weight.minimum is not None:
        offsets.append(_compute_minimums(weight, scale.dtype))
    if not offsets:
        return y
    sums = jnp.sum(x.reshape(*x.shape[:-1], num_groups, -1), axis=-1, dtype=scale.dtype)
    return y - jnp.einsum(equation, sums, sum(offsets), precision=lax.Precision.HIGHEST)


def repeat(part: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Repeats the numbers of blocks along each axis until they have a shape."""
    for axis, size in enumerate(shape):
        if size != part.shape[axis]:
            part = jnp.repeat(part, size // part.shape[axis], axis=axis)
    return part


def _spread(part: jax.Array, shape: tuple[int, ...], wide: DTypeLike) -> jax.Array:
    """Returns `repeat` in a wide dtype. If numbers repeat along one axis only, uses the variant that is fast on a TPU."""
    axes = [axis for axis, size in enumerate(shape) if size != part.shape[axis]]

    def spread_by_broadcast(part: jax.Array) -> jax.Array:
        return repeat(part.astype(wide), shape)

    def spread_by_product(part: jax.Array) -> jax.Array:
        return _spread_by_product(part, axes[0], shape[axes[0]], wide)

    if len(axes) != 1:
        return spread_by_broadcast(part)
    return lax.platform_dependent(part, tpu=spread_by_product, default=spread_by_broadcast)


def _spread_by_product(part: jax.Array, axis: int, size: int, wide: DTypeLike) -> jax.Array:
    """Repeats numbers along an axis by a product with zeros and ones, which changes no number.

    The product is in bfloat16 if bfloat16 represents all numbers. A TPU takes six times as long to scale a weight by a
    broadcast.
    """
    is_exact = part.dtype.name in EXACT_IN_BFLOAT16
    part = jnp.moveaxis(part.astype(jnp.bfloat16 if is_exact else wide), axis, -1)
    count, times = part.shape[-1], size // part.shape[-1]
    local = count // math.gcd(count, model_ways())  # groups of a shard
    depth = next(depth for depth in range(min(MATRIX_UNIT_ROWS, local), 0, -1) if local % depth == 0)
    ones = jnp.repeat(jnp.eye(depth, dtype=part.dtype), times, axis=1)
    precision = None if is_exact else lax.Precision.HIGHEST
    part = part.reshape(*part.shape[:-1], -1, depth)
    spread = jnp.einsum("...d,dz->...z", part, ones, precision=precision, preferred_element_type=wide)
    return jnp.moveaxis(spread.reshape(*part.shape[:-2], -1), -1, axis)


def model_ways() -> int:
    """Returns the number of parts of an array along the mesh's model axis; 1 inside a `jax.shard_map` over it."""
    mesh = sharding.current()
    return mesh.shape["model"] if "model" in sharding.free_axes(mesh) else 1


def count_parts(size: int, ways: int) -> int:
    """Returns the smallest divisor, at least MIN_PARTS, of a shard's part of an axis; the whole part if that is shorter."""
    local = size // math.gcd(size, ways)
    return next(parts for parts in range(min(MIN_PARTS, local), local + 1) if local % parts == 0)


def einsum(equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """Returns an einsum in float32 at least."""
    return jnp.einsum(equation, left, right, preferred_element_type=at_least_float32(left.dtype))
