"""Products with 8-bit weights that have a scale per block of outputs and inputs, in the form that writes fewest bytes.

XLA would write a copy of a weight that is scaled as it is read, in the dtype of the activations. Instead, few vectors are
scaled, once for each block of outputs: y[j] = (x * s[j]) w[j]^T, which writes as much as n / B copies of the weight for n
vectors and blocks of B outputs. For more vectors, parts of the weight are scaled one after the other.

Shape suffixes: n vectors, i inputs, b outputs of a block, `...` the blocks of all output axes; and of experts, x experts, k
blocks of inputs, z inputs of a block, f outputs, g blocks of outputs.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from treeflash_jax.core import sharding
from treeflash_jax.core.dtypes import at_least_float32
from treeflash_jax.models import kernels
from treeflash_jax.models.backend import products

PARTS = 4  # at least; of a weight that are scaled one after the other


def product(x: jax.Array, values: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """Returns activations times a weight, [vectors..., outputs...].

    Args:
      x: [vectors..., i].
      values: [outputs..., i].
      scale: [blocks of each output axis..., blocks of inputs].
      dtype: of the result; sums are float32 at least.
    """
    x_ni, outputs = x.reshape(-1, x.shape[-1]), values.shape[:-1]
    values = values.reshape(*scale.shape[:-1], -1, values.shape[-1])  # [..., b, i]
    plain = (
        _single if products.is_one_vector(x_ni, 1) else _scaled_inputs if x_ni.shape[0] < values.shape[-2] else _in_parts
    )
    form = kernels.find("product by blocks", x_ni, values, scale) or plain
    y = form(x_ni, values, scale).astype(dtype)  # [..., n, b]
    return jnp.moveaxis(y, -2, 0).reshape(*x.shape[:-1], *outputs)


def expert_product(x_xni: jax.Array, values_xif: jax.Array, scale_xkg: jax.Array) -> jax.Array:
    """Returns the vectors of each expert times its matrix, [x, n, f], in float32 at least.

    Sums over blocks of inputs are scaled, since a batch over blocks of outputs would need another layout of the matrices.
    TPUs do not store these sums (compiled for 64 and 256 vectors). Other devices do, so for many vectors they scale parts
    of the matrices instead, which a TPU would copy whole first.
    """
    arrays = x_xni, values_xif, scale_xkg
    wide = at_least_float32(x_xni.dtype)
    sums_are_smaller = x_xni.shape[1] * wide.itemsize < x_xni.shape[2] // scale_xkg.shape[1] * x_xni.dtype.itemsize
    default = _scaled_sums if sums_are_smaller else _experts_in_parts
    return lax.platform_dependent(*arrays, tpu=_scaled_sums, default=default)


def _scaled_sums(x_xni: jax.Array, values_xif: jax.Array, scale_xkg: jax.Array) -> jax.Array:
    (experts, count, _), blocks = x_xni.shape, scale_xkg.shape[1]
    x_xnkz = x_xni.reshape(experts, count, blocks, -1)
    values_xkzf = values_xif.reshape(experts, blocks, -1, values_xif.shape[-1])
    y_xknf = _einsum("xnkz,xkzf->xknf", x_xnkz, values_xkzf.astype(x_xni.dtype))
    y_xkngb = y_xknf.reshape(*y_xknf.shape[:3], scale_xkg.shape[2], -1)
    return jnp.sum(y_xkngb * scale_xkg[:, :, None, :, None].astype(y_xkngb.dtype), axis=1).reshape(experts, count, -1)


def _experts_in_parts(x_xni: jax.Array, values_xif: jax.Array, scale_xkg: jax.Array) -> jax.Array:
    experts, count, _ = x_xni.shape
    arrays = [a.reshape(_count_parts(experts, 1), -1, *a.shape[1:]) for a in (x_xni, values_xif, scale_xkg)]
    y = lax.map(lambda part: _einsum("xni,xif->xnf", part[0], scaled(*part[1:], x_xni.dtype)), arrays)
    return y.reshape(experts, count, -1)


def scaled(values: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """Returns values * scale, each axis of the scale repeated to that of the values, rounded once from float32 at least."""
    wide = at_least_float32(dtype)
    scale = scale.astype(wide)
    for axis, size in enumerate(values.shape):
        scale = jnp.repeat(scale, size // scale.shape[axis], axis=axis)
    return (values.astype(wide) * scale).astype(dtype)


def _single(x_ni: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
    """Multiplies one vector per device. A TPU would write a float32 copy of some weights for it, but nothing for two."""

    def doubled(x_ni: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
        pairs = jnp.pad(x_ni[:, None], ((0, 0), (0, 1), (0, 0)))  # beside each other, so on the device of the vector
        return _scaled_inputs(pairs.reshape(-1, x_ni.shape[1]), values, scale)[..., ::2, :]

    arrays = x_ni, values, scale
    if x_ni.shape[0] == 1:
        return lax.platform_dependent(*arrays, cuda=_scaled_inputs, default=doubled)
    return lax.platform_dependent(*arrays, tpu=doubled, default=_scaled_inputs)


def _scaled_inputs(x_ni: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
    blocks = x_ni.reshape(x_ni.shape[0], scale.shape[-1], -1) * scale[..., None, :, None].astype(x_ni.dtype)
    return _einsum("...ni,...bi->...nb", blocks.reshape(*scale.shape[:-1], *x_ni.shape), values.astype(x_ni.dtype))


def _in_parts(x_ni: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
    """Scales a part of the longest output axis at a time; every part has indices of all shards of a mesh."""
    mesh, (*outer, _) = sharding.current(), scale.shape
    axis = max(range(len(outer)), key=lambda axis: outer[axis])
    parts = _count_parts(outer[axis], 1 if mesh is None else dict(mesh.shape).get("model", 1))
    values, scale = (a.reshape(*a.shape[:axis], -1, parts, *a.shape[axis + 1 :]) for a in (values, scale[..., None, :]))

    def multiply(index: jax.Array) -> jax.Array:
        part = [lax.dynamic_index_in_dim(a, index, axis + 1, keepdims=False) for a in (values, scale)]
        return _einsum("ni,...bi->...nb", x_ni, scaled(*part, x_ni.dtype))

    y = lax.map(multiply, jnp.arange(parts))
    return jnp.moveaxis(y, 0, axis + 1).reshape(*outer, *y.shape[-2:])


def _count_parts(size: int, ways: int) -> int:
    """Returns the smallest divisor of a shard's part of an axis that is at least PARTS; all of a shorter one."""
    local = size // math.gcd(size, ways)
    return next(parts for parts in range(min(PARTS, local), local + 1) if local % parts == 0)


def _einsum(equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(equation, left, right, preferred_element_type=at_least_float32(left.dtype))
