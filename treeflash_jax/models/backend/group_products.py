"""Products with weights that have a scale per output and group of inputs, in the variant that writes fewest bytes.

For n vectors and groups of G inputs:

| device | when | function | ran there? |
|---|---|---|---|
| CPU | always | `_scale_weight_in_parts` | yes |
| GPU | n <= G / 2 | `_scale_sums`: writes 2 n / G copies of the weight in bfloat16 | no |
| GPU | otherwise | `_scale_weight_in_parts` | no |
| TPU | n <= MOST_VECTORS_MASKED, or one vector per device | `_scale_sums_of_masked_inputs` | no |
| TPU | otherwise | `_scale_weight` | no |

On a mesh, a TPU multiplies by its part of a layer's weight (`_multiply_shards`).

Shape suffixes: n vectors, i inputs, `...` output axes, k groups of inputs, z inputs of a group.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from treeflash_jax.core import sharding
from treeflash_jax.core.dtypes import at_least_float32
from treeflash_jax.models.backend import block_scales, products
from treeflash_jax.models.quantized_weight import Quantized

MOST_VECTORS_MASKED = 2  # up to this number of vectors, TPUs mask the inputs outside each group


def has_groups(weight: Quantized) -> bool:
    """Returns whether each output has a separate scale per group of inputs."""
    return weight.scale.shape[:-1] == weight.shape[:-1]


def multiply(x_ni: jax.Array, weight: Quantized) -> jax.Array:
    """Returns [n, outputs...]; on one device, [n, o] with the output axes flattened."""
    if block_scales.model_ways() == 1:
        weight = _with_one_output_axis(weight)
    count, group = x_ni.shape[0], weight.block[-1]
    are_few = count <= MOST_VECTORS_MASKED or products.is_one_vector(x_ni, 1)
    variants = {
        # For `_scale_sums`, a TPU would hold copies of weights in another layout.
        "tpu": partial(_multiply_shards, _scale_sums_of_masked_inputs if are_few else _scale_weight),
        "cuda": _scale_sums if count <= group / 2 else _scale_weight_in_parts,
        "default": _scale_weight_in_parts,
    }
    return lax.platform_dependent(x_ni, weight, **variants)


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
    y_kn = block_scales.einsum("nkz,...kz->kn...", x_nkz, values)
    y = jnp.sum(y_kn * jnp.moveaxis(scale, -1, 0)[:, None], axis=0)
    return _subtract_offsets(y, x_ni, weight, scale)


def _scale_sums_of_masked_inputs(x_ni: jax.Array, weight: Quantized) -> jax.Array:
    """Computes `_scale_sums` by products with the whole values: a vector per group has zeros in place of other inputs."""
    scale = block_scales.compute_scales(weight, at_least_float32(x_ni.dtype))
    count, (groups, group) = x_ni.shape[0], (scale.shape[-1], weight.block[-1])
    is_in_group_ki = jnp.arange(x_ni.shape[1]) // group == jnp.arange(groups)[:, None]
    x_nki = jnp.where(is_in_group_ki, x_ni[:, None], 0)
    y = block_scales.einsum("mi,...i->m...", x_nki.reshape(count * groups, -1), weight.values.astype(x_ni.dtype))
    y = jnp.sum(y.reshape(count, groups, *y.shape[1:]) * jnp.moveaxis(scale, -1, 0), axis=1)
    return _subtract_offsets(y, x_ni, weight, scale)


def _scale_weight(x_ni: jax.Array, weight: Quantized) -> jax.Array:
    """Scales the weight as it is read, and subtracts offsets from the sums.

    With a second array of a weight's size, for the offsets, a TPU would take three times as long.
    """
    y = block_scales.einsum("ni,...i->n...", x_ni, block_scales.widen(weight.replace(zero=None, minimum=None), x_ni.dtype))
    return _subtract_offsets(y, x_ni, weight, block_scales.compute_scales(weight, y.dtype))


def _scale_weight_in_parts(x_ni: jax.Array, weight: Quantized) -> jax.Array:
    """Widens part of the longest output axis at a time. Every part has indices from all shards of a mesh."""
    outputs = weight.shape[:-1]
    axis = max(range(len(outputs)), key=lambda axis: outputs[axis])
    parts = block_scales.count_parts(outputs[axis], block_scales.model_ways())
    split = jax.tree.map(lambda a: a.reshape(*a.shape[:axis], -1, parts, *a.shape[axis + 1 :]), weight)

    def multiply(index: jax.Array) -> jax.Array:
        part = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, axis + 1, keepdims=False), split)
        wide = block_scales.widen(part, x_ni.dtype)
        return products.dense_product("ni,...i->n...", x_ni, wide, at_least_float32(x_ni.dtype))

    y = lax.map(multiply, jnp.arange(parts))  # [parts, n, outputs...]
    return jnp.moveaxis(y, 0, axis + 2).reshape(-1, *outputs)


def _subtract_offsets(y: jax.Array, x_ni: jax.Array, weight: Quantized, scale: jax.Array) -> jax.Array:
    return block_scales.subtract_offsets("nk,...k->n...", y, x_ni, weight, scale, num_groups=scale.shape[-1])
