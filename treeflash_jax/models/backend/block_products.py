"""Products with weights that have a scale per block of outputs and inputs, in the form that writes fewest bytes.

XLA would store a copy of a weight that is scaled as it is read, in the dtype of the activations. For n vectors, blocks of B
outputs, and groups of G inputs, these functions write less:

| a scale for each | device | vectors | function |
|---|---|---|---|
| block | any | one per device | `_multiply_one_vector` |
| block | any | n < B | `_scale_inputs`: writes n / B copies of the weight |
| block | any | more | `_scale_blocks_in_parts` |
| output and group | CPU | any | `_scale_weight_in_parts` |
| output and group | GPU | n <= G / 2 | `_scale_sums`: writes 2 n / G copies of the weight in bfloat16 |
| output and group | GPU | more | `_scale_weight_in_parts` |
| output and group | TPU | n <= MOST_VECTORS_MASKED, or one per device | `_scale_sums_of_masked_inputs` |
| output and group | TPU | more | `_scale_weight` |

On a mesh, a TPU multiplies by its part of a layer's weight (`_multiply_shards`). With a scale for each block, a kernel may
replace the function (`models.kernels`). All weights have blocks, and their inputs are in order.

Shape suffixes: n vectors, i inputs, b outputs of a block, `...` blocks of all output axes, k groups of inputs, z inputs
of a group.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from treeflash_jax.core import sharding
from treeflash_jax.core.dtypes import at_least_float32
from treeflash_jax.models import kernels
from treeflash_jax.models.backend import block_scales, products
from treeflash_jax.models.quantized_weight import Quantized

MIN_PARTS = 4  # fewest parts of a weight that is scaled part by part
MOST_VECTORS_MASKED = 2  # up to this number of vectors, TPUs mask the inputs outside each group


def product(x: jax.Array, weight: Quantized, dtype: DTypeLike) -> jax.Array:
    """Returns activations times a weight, [vectors..., outputs...].

    Args:
      x: [vectors..., i].
      weight: values [outputs..., i], scales [blocks of each output axis..., blocks of inputs].
      dtype: dtype of the result; sums are float32 at least.
    """
    x_ni, outputs = x.reshape(-1, x.shape[-1]), weight.shape[:-1]
    if has_groups(weight):
        if block_scales.model_ways() == 1:
            weight = _with_one_output_axis(weight)
        y = _multiply_groups(x_ni, weight)
    else:
        y = jnp.moveaxis(_multiply_blocks(x_ni, weight), -2, 0)
    return y.astype(dtype).reshape(*x.shape[:-1], *outputs)


def has_groups(weight: Quantized) -> bool:
    """Returns whether each output has a separate scale per group of inputs."""
    return weight.scale.shape[:-1] == weight.shape[:-1]


# A scale for each block.


def _multiply_blocks(x_ni: jax.Array, weight: Quantized) -> jax.Array:
    """Returns [..., n, b]."""
    values, scale = weight.values, weight.scale
    values = values.reshape(*scale.shape[:-1], -1, values.shape[-1])  # [..., b, i]
    if products.is_one_vector(x_ni, 1):
        multiply = _multiply_one_vector
    elif x_ni.shape[0] < values.shape[-2]:
        multiply = _scale_inputs
    else:
        multiply = _scale_blocks_in_parts
    multiply = kernels.find("product by blocks", x_ni, values, scale) or multiply
    return multiply(x_ni, values, scale)


def _multiply_one_vector(x_ni: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
    """Multiplies a vector per device as two. For one, a TPU would write a float32 copy of some weights; for two, none."""

    def multiply_two(x_ni: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
        return _scale_inputs(_append_zero_vectors(x_ni), values, scale)[..., ::2, :]

    arrays = x_ni, values, scale
    if x_ni.shape[0] == 1:
        return lax.platform_dependent(*arrays, cuda=_scale_inputs, default=multiply_two)
    return lax.platform_dependent(*arrays, tpu=multiply_two, default=_scale_inputs)


def _scale_inputs(x_ni: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
    """Scales copies of the vectors, one for each block of outputs: y[j] = (x * s[j]) w[j]^T."""
    blocks = x_ni.reshape(x_ni.shape[0], scale.shape[-1], -1) * scale[..., None, :, None].astype(x_ni.dtype)
    return einsum("...ni,...bi->...nb", blocks.reshape(*scale.shape[:-1], *x_ni.shape), values.astype(x_ni.dtype))


def _scale_blocks_in_parts(x_ni: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
    """Scales part of the longest axis of blocks at a time. Every part has indices from all shards of a mesh."""
    (*outer, _), scale = scale.shape, scale[..., None, :]
    axis = max(range(len(outer)), key=lambda axis: outer[axis])
    parts = count_parts(outer[axis], block_scales.model_ways())
    values, scale = (a.reshape(*a.shape[:axis], -1, parts, *a.shape[axis + 1 :]) for a in (values, scale))

    def multiply(index: jax.Array) -> jax.Array:
        values_bi, scale_k = (lax.dynamic_index_in_dim(a, index, axis + 1, keepdims=False) for a in (values, scale))
        wide = at_least_float32(x_ni.dtype)
        weight_bi = values_bi.astype(wide) * block_scales.repeat(scale_k.astype(wide), values_bi.shape)
        return einsum("ni,...bi->...nb", x_ni, weight_bi.astype(x_ni.dtype))

    y = lax.map(multiply, jnp.arange(parts))
    return jnp.moveaxis(y, 0, axis + 1).reshape(*outer, *y.shape[-2:])


# A scale for each output and group.


def _multiply_groups(x_ni: jax.Array, weight: Quantized) -> jax.Array:
    """Returns [n, outputs...]."""
    count, group = x_ni.shape[0], weight.block[-1]
    is_one = products.is_one_vector(x_ni, 1)
    # For `_scale_sums`, a TPU would hold copies of weights in another layout.
    on_tpu = _scale_sums_of_masked_inputs if is_one or count <= MOST_VECTORS_MASKED else _scale_weight
    on_tpu = partial(_multiply_shards, on_tpu)
    on_gpu = _scale_sums if 2 * count <= group else _scale_weight_in_parts
    return lax.platform_dependent(x_ni, weight, tpu=on_tpu, cuda=on_gpu, default=_scale_weight_in_parts)


def _multiply_shards(
    multiply: Callable[[jax.Array, Quantized], jax.Array], x_ni: jax.Array, weight: Quantized
) -> jax.Array:
    """Multiplies by each device's part of the weight. If the model axis splits the inputs, adds up the products.

    If XLA partitioned this, a TPU would copy whole parts of weights into other layouts in every pass.
    """
    if weight.partition is None:
        return multiply(x_ni, weight)
    *outputs, inputs = weight.partition

    def run(x_ni: jax.Array, weight: Quantized) -> jax.Array:
        flat = lax.optimization_barrier(_with_one_output_axis(weight))  # or XLA widens the weight before flattening it
        y = multiply(x_ni, flat).reshape(-1, *weight.shape[:-1])
        return y if inputs is None else lax.psum(y, inputs)

    parts = jax.tree.map(lambda part: PartitionSpec(*outputs, inputs if part.shape[-1] > 1 else None), weight)
    layouts = {"in_specs": (PartitionSpec(None, inputs), parts), "out_specs": PartitionSpec(None, *outputs)}
    return jax.shard_map(run, mesh=sharding.current(), **layouts, axis_names={"model"}, check_vma=False)(x_ni, weight)


def _with_one_output_axis(weight: Quantized) -> Quantized:
    """Flattens the output axes. A TPU would copy a weight with several output axes into another layout."""
    return jax.tree.map(lambda part: part.reshape(-1, part.shape[-1]), weight)


def _scale_sums(x_ni: jax.Array, weight: Quantized) -> jax.Array:
    """Multiplies by the values of each group, and scales the sums over groups."""
    scale = block_scales.compute_scales(weight, at_least_float32(x_ni.dtype))
    x_nkz = x_ni.reshape(x_ni.shape[0], scale.shape[-1], -1)
    values = weight.values.reshape(*scale.shape, -1).astype(x_ni.dtype)
    y_kn = einsum("nkz,...kz->kn...", x_nkz, values)
    y = jnp.sum(y_kn * jnp.moveaxis(scale, -1, 0)[:, None], axis=0)
    return _subtract_offsets(y, x_ni, weight, scale)


def _scale_sums_of_masked_inputs(x_ni: jax.Array, weight: Quantized) -> jax.Array:
    """Computes `_scale_sums` by products with the whole values: a vector per group has zeros in place of other inputs."""
    scale = block_scales.compute_scales(weight, at_least_float32(x_ni.dtype))
    count, (groups, group) = x_ni.shape[0], (scale.shape[-1], weight.block[-1])
    is_in_group_ki = jnp.arange(x_ni.shape[1]) // group == jnp.arange(groups)[:, None]
    x_nki = jnp.where(is_in_group_ki, x_ni[:, None], 0)
    y = einsum("mi,...i->m...", x_nki.reshape(count * groups, -1), weight.values.astype(x_ni.dtype))
    y = jnp.sum(y.reshape(count, groups, *y.shape[1:]) * jnp.moveaxis(scale, -1, 0), axis=1)
    return _subtract_offsets(y, x_ni, weight, scale)


def _scale_weight(x_ni: jax.Array, weight: Quantized) -> jax.Array:
    """Scales the weight as it is read, and subtracts offsets from the sums.

    With a second array of a weight's size, for the offsets, a TPU would take three times as long.
    """
    y = einsum("ni,...i->n...", x_ni, block_scales.widen(weight.replace(zero=None, minimum=None), x_ni.dtype))
    return _subtract_offsets(y, x_ni, weight, block_scales.compute_scales(weight, y.dtype))


def _scale_weight_in_parts(x_ni: jax.Array, weight: Quantized) -> jax.Array:
    """Widens part of the longest output axis at a time. Every part has indices from all shards of a mesh."""
    outputs = weight.shape[:-1]
    axis = max(range(len(outputs)), key=lambda axis: outputs[axis])
    parts = count_parts(outputs[axis], block_scales.model_ways())
    split = jax.tree.map(lambda a: a.reshape(*a.shape[:axis], -1, parts, *a.shape[axis + 1 :]), weight)

    def multiply(index: jax.Array) -> jax.Array:
        part = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, axis + 1, keepdims=False), split)
        wide = block_scales.widen(part, x_ni.dtype)
        return products.product("ni,...i->n...", x_ni, wide, at_least_float32(x_ni.dtype))

    y = lax.map(multiply, jnp.arange(parts))  # [parts, n, outputs...]
    return jnp.moveaxis(y, 0, axis + 2).reshape(-1, *outputs)


def _subtract_offsets(y: jax.Array, x_ni: jax.Array, weight: Quantized, scale: jax.Array) -> jax.Array:
    return block_scales.subtract_offsets("nk,...k->n...", y, x_ni, weight, scale, num_groups=scale.shape[-1])


def _append_zero_vectors(x_ni: jax.Array) -> jax.Array:
    """Puts a vector of zeros beside each vector, on the same device."""
    return jnp.pad(x_ni[:, None], ((0, 0), (0, 1), (0, 0))).reshape(-1, x_ni.shape[1])


def count_parts(size: int, ways: int) -> int:
    """Returns the smallest divisor, at least MIN_PARTS, of a shard's part of an axis; the whole part if that is shorter."""
    local = size // math.gcd(size, ways)
    return next(parts for parts in range(min(MIN_PARTS, local), local + 1) if local % parts == 0)


def einsum(equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """Returns an einsum in float32 at least."""
    return jnp.einsum(equation, left, right, preferred_element_type=at_least_float32(left.dtype))
