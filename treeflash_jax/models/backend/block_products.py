"""Products with weights that have a scale per block of outputs and inputs, in the variant that writes fewest bytes.

XLA would store a copy of a weight that is scaled as it is read, in the dtype of the activations. For n vectors and blocks
of B outputs, these functions write less. The first row that applies decides:

| device | when | function | ran there? |
|---|---|---|---|
| CPU | n = 1 | `_multiply_one_vector`: multiplies two | yes |
| TPU | one vector per device | `_multiply_one_vector`: multiplies two | no |
| all | n < B, or one vector per device | `_scale_inputs`: writes n / B copies of the weight | on CPUs |
| all | otherwise | `_scale_blocks_in_parts` | on CPUs |

A kernel may replace the function (`models.kernels`). `group_products` has the functions for weights with a scale for each
output and group of inputs. All weights have blocks, and their inputs are in order.

Shape suffixes: n vectors, i inputs, b outputs of a block, `...` blocks of all output axes, k blocks of inputs.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from treeflash_jax.core.dtypes import at_least_float32
from treeflash_jax.models import kernels
from treeflash_jax.models.backend import block_scales, group_products, products
from treeflash_jax.models.quantized_weight import Quantized


def block_product(x: jax.Array, weight: Quantized, dtype: DTypeLike) -> jax.Array:
    """Returns activations times a weight, [vectors..., outputs...].

    Args:
      x: [vectors..., i].
      weight: values [outputs..., i], scales [blocks of each output axis..., blocks of inputs].
      dtype: dtype of the result; sums are float32 at least.
    """
    x_ni, outputs = x.reshape(-1, x.shape[-1]), weight.shape[:-1]
    if group_products.has_groups(weight):
        y = group_products.multiply(x_ni, weight)
    else:
        y = jnp.moveaxis(_multiply_blocks(x_ni, weight), -2, 0)
    return y.astype(dtype).reshape(*x.shape[:-1], *outputs)


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
    """Multiplies a vector per device as two. For one, a TPU would write a float32 copy of some weights; for two, none.

    If there is one vector in all, CPUs run the same variant.
    """

    def multiply_two(x_ni: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
        return _scale_inputs(_append_zero_vectors(x_ni), values, scale)[..., ::2, :]

    arrays = x_ni, values, scale
    if x_ni.shape[0] == 1:
        return lax.platform_dependent(*arrays, cuda=_scale_inputs, default=multiply_two)
    return lax.platform_dependent(*arrays, tpu=multiply_two, default=_scale_inputs)


def _scale_inputs(x_ni: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
    """Scales copies of the vectors, one for each block of outputs: y[j] = (x * s[j]) w[j]^T."""
    blocks = x_ni.reshape(x_ni.shape[0], scale.shape[-1], -1) * scale[..., None, :, None].astype(x_ni.dtype)
    return block_scales.einsum(
        "...ni,...bi->...nb", blocks.reshape(*scale.shape[:-1], *x_ni.shape), values.astype(x_ni.dtype)
    )


def _scale_blocks_in_parts(x_ni: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
    """Scales part of the longest axis of blocks at a time. Every part has indices from all shards of a mesh."""
    (*outer, _), scale = scale.shape, scale[..., None, :]
    axis = max(range(len(outer)), key=lambda axis: outer[axis])
    parts = block_scales.count_parts(outer[axis], block_scales.model_ways())
    values = values.reshape(*values.shape[:axis], -1, parts, *values.shape[axis + 1 :])
    scale = scale.reshape(*scale.shape[:axis], -1, parts, *scale.shape[axis + 1 :])

    def multiply(index: jax.Array) -> jax.Array:
        values_bi = lax.dynamic_index_in_dim(values, index, axis + 1, keepdims=False)
        scale_k = lax.dynamic_index_in_dim(scale, index, axis + 1, keepdims=False)
        wide = at_least_float32(x_ni.dtype)
        weight_bi = values_bi.astype(wide) * block_scales.repeat(scale_k.astype(wide), values_bi.shape)
        return block_scales.einsum("ni,...bi->...nb", x_ni, weight_bi.astype(x_ni.dtype))

    y = lax.map(multiply, jnp.arange(parts))
    return jnp.moveaxis(y, 0, axis + 1).reshape(*outer, *y.shape[-2:])


def _append_zero_vectors(x_ni: jax.Array) -> jax.Array:
    """Puts a vector of zeros beside each vector, on the same device."""
    return jnp.pad(x_ni[:, None], ((0, 0), (0, 1), (0, 0))).reshape(-1, x_ni.shape[1])
