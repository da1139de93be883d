"""Products of experts with their matrices, each with a scale per block of inputs and outputs.

For n vectors per expert and blocks of G inputs:

| device | when | function | ran there? |
|---|---|---|---|
| CPU, GPU | n < G, in bfloat16 n < G / 2 | `_scale_sums`: writes less than a copy of the weight | on CPUs |
| CPU, GPU | otherwise | `_scale_weights_in_parts` | on CPUs |
| TPU | a scale per output, and n > G / 2 or n > MOST_VECTORS_SUMMED | `_scale_weights` | no |
| TPU | otherwise | `_scale_sums` | no |

Shape suffixes: x experts, n vectors, i inputs, f outputs, k blocks of inputs, z inputs of a block, g blocks of outputs, b
outputs of a block.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from treeflash_jax.core.dtypes import at_least_float32
from treeflash_jax.models.backend import block_scales
from treeflash_jax.models.quantized_weight import Quantized

MOST_VECTORS_SUMMED = 32  # up to this number of vectors, TPUs scale the sums over groups


def expert_product(x_xni: jax.Array, weight: Quantized) -> jax.Array:
    """Returns the vectors of each expert times its matrix, [x, n, f], in float32 at least.

    This scales the sums over blocks of inputs, because a batch over blocks of outputs would need another layout of the
    matrices. TPUs do not store these sums (compiled for 64 and 256 vectors). Other devices do. For many vectors, they scale
    parts of the matrices instead; a TPU would first copy these parts whole.

    Args:
      weight: values [x, i, f] and scales [x, k, g].
    """
    count, group = x_xni.shape[1], weight.block[1]
    wide = at_least_float32(x_xni.dtype)
    sums_are_smaller = count * wide.itemsize < group * x_xni.dtype.itemsize
    default = _scale_sums if sums_are_smaller else _scale_weights_in_parts
    has_scale_per_output = weight.scale.shape[2] == weight.shape[2]
    if has_scale_per_output and count > min(group // 2, MOST_VECTORS_SUMMED):
        on_tpu = _scale_weights
    else:
        on_tpu = _scale_sums
    return lax.platform_dependent(x_xni, weight, tpu=on_tpu, default=default)


def keep_layout(weights: Any) -> Any:
    """Keeps weights in their layout. Otherwise XLA would copy whole weights, of all layers at once, into another layout."""
    return jax.tree.map(lambda x: with_layout_constraint(x, Layout(tuple(range(x.ndim)))), weights)


def _scale_sums(x_xni: jax.Array, weight: Quantized) -> jax.Array:
    experts, count, _ = x_xni.shape
    scale_xkg = block_scales.compute_scales(weight, at_least_float32(x_xni.dtype))
    x_xnkz = x_xni.reshape(experts, count, scale_xkg.shape[1], -1)
    values_xkzf = weight.values.reshape(experts, scale_xkg.shape[1], -1, weight.shape[-1])
    y_xknf = block_scales.einsum("xnkz,xkzf->xknf", x_xnkz, values_xkzf.astype(x_xni.dtype))
    y_xkngb = y_xknf.reshape(*y_xknf.shape[:3], scale_xkg.shape[2], -1)
    y_xnf = jnp.sum(y_xkngb * scale_xkg[:, :, None, :, None], axis=1).reshape(experts, count, -1)
    return _subtract_offsets(y_xnf, x_xni, weight, scale_xkg)


def _scale_weights(x_xni: jax.Array, weight: Quantized) -> jax.Array:
    widened_xif = block_scales.widen(weight.replace(zero=None, minimum=None), x_xni.dtype)
    y_xnf = block_scales.einsum("xni,xif->xnf", x_xni, widened_xif)
    return _subtract_offsets(y_xnf, x_xni, weight, block_scales.compute_scales(weight, y_xnf.dtype))


def _scale_weights_in_parts(x_xni: jax.Array, weight: Quantized) -> jax.Array:
    experts, count, _ = x_xni.shape
    parts = block_scales.count_parts(experts, 1)
    x_split, weight_split = jax.tree.map(lambda a: a.reshape(parts, -1, *a.shape[1:]), (x_xni, weight))

    def multiply(part: tuple[jax.Array, Quantized]) -> jax.Array:
        x_xni, weight = part[0], keep_layout(part[1])
        return block_scales.einsum("xni,xif->xnf", x_xni, block_scales.widen(weight, x_xni.dtype))

    return lax.map(multiply, (x_split, keep_layout(weight_split))).reshape(experts, count, -1)


def _subtract_offsets(y_xnf: jax.Array, x_xni: jax.Array, weight: Quantized, scale_xkf: jax.Array) -> jax.Array:
    num_groups = scale_xkf.shape[1]
    return block_scales.subtract_offsets("xnk,xkf->xnf", y_xnf, x_xni, weight, scale_xkf, num_groups)
