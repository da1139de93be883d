"""Products with weights that have a scale per block of outputs and inputs, in the form that writes fewest bytes.

XLA would write a copy of a weight that is scaled as it is read, in the dtype of the activations. Instead, if blocks have
many outputs, few vectors are scaled, once for each block of outputs: y[j] = (x * s[j]) w[j]^T, which writes as much as n /
B copies of the weight for n vectors and blocks of B outputs. If every output has its scales, one per group of inputs, the
sums over groups are scaled: as much as 2 n / G copies in bfloat16, for groups of G inputs. For more vectors, parts of the
weight are scaled one after the other. With a scale per output and group, TPUs need no parts: they scale the whole weight as
they read it, if a product with zeros and ones repeats the scales (a broadcast would take six times as long). For one or two
vectors, a single TPU multiplies each group of inputs as a vector with zeros elsewhere, and scales the sums; TPUs of a mesh
with a model axis scale the sums over groups of up to 32 vectors, or half as many as a group has inputs.

A weight is a `quantized.Quantized` with blocks, whose inputs are in order.

Shape suffixes: n vectors, i inputs, b outputs of a block, `...` the blocks of all output axes; and of experts, x experts, k
blocks of inputs, z inputs of a block, f outputs, g blocks of outputs.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from treeflash_jax.core import sharding
from treeflash_jax.core.dtypes import at_least_float32
from treeflash_jax.models import kernels
from treeflash_jax.models.backend import products

PARTS = 4  # at least; of a weight that are scaled one after the other
MOST_SUMMED = 32  # vectors for which TPUs of a mesh scale sums of groups; at most half as many as a group has inputs
MOST_PARTED = 2  # vectors for which one TPU does so
DEPTH = 128  # rows of a TPU's matrix unit
NARROW = ("bfloat16", "float8_e4m3fn", "float8_e8m0fnu", "int8", "uint8")  # whose numbers bfloat16 holds


def product(x: jax.Array, weight: Any, dtype: Any) -> jax.Array:
    """Returns activations times a weight, [vectors..., outputs...].

    Args:
      x: [vectors..., i].
      weight: values [outputs..., i], scales [blocks of each output axis..., blocks of inputs].
      dtype: of the result; sums are float32 at least.
    """
    x_ni, outputs = x.reshape(-1, x.shape[-1]), weight.shape[:-1]
    if has_groups(weight):
        if _model_ways() == 1:  # a TPU would copy weights of several output axes into another layout
            weight = jax.tree.map(lambda part: part.reshape(-1, part.shape[-1]), weight)
        y = _product_by_groups(x_ni, weight)
    else:
        y = jnp.moveaxis(_product_by_blocks(x_ni, weight), -2, 0)
    return y.astype(dtype).reshape(*x.shape[:-1], *outputs)


def has_groups(weight: Any) -> bool:
    """Returns whether every output has scales of its own."""
    return weight.scale.shape[:-1] == weight.shape[:-1]


def _product_by_blocks(x_ni: jax.Array, weight: Any) -> jax.Array:
    """Returns [..., n, b]."""
    values, scale = weight.values, weight.scale
    values = values.reshape(*scale.shape[:-1], -1, values.shape[-1])  # [..., b, i]
    plain = (
        _single if products.is_one_vector(x_ni, 1) else _scaled_inputs if x_ni.shape[0] < values.shape[-2] else _in_parts
    )
    form = kernels.find("product by blocks", x_ni, values, scale) or plain
    return form(x_ni, values, scale)


def _product_by_groups(x_ni: jax.Array, weight: Any) -> jax.Array:
    """Returns [n, outputs...]."""
    count, group = x_ni.shape[0], weight.block[-1]
    is_one = products.is_one_vector(x_ni, 1)
    on_tpu = _scaled_sums if count <= min(group // 2, MOST_SUMMED) else _scaled_weight
    if _model_ways() == 1:  # a TPU would hold copies of weights in another layout for `_scaled_sums`
        on_tpu = _scaled_sums_of_parts if is_one or count <= MOST_PARTED else _scaled_weight
    elif is_one:
        on_tpu = partial(_doubled, on_tpu)
    on_gpu = _scaled_sums if 2 * count <= group else _weight_in_parts
    return lax.platform_dependent(x_ni, weight, tpu=on_tpu, cuda=on_gpu, default=_weight_in_parts)


def expert_product(x_xni: jax.Array, weight: Any) -> jax.Array:
    """Returns the vectors of each expert times its matrix, [x, n, f], in float32 at least.

    Sums over blocks of inputs are scaled, since a batch over blocks of outputs would need another layout of the matrices.
    TPUs do not store these sums (compiled for 64 and 256 vectors). Other devices do, so for many vectors they scale parts
    of the matrices instead, which a TPU would copy whole first.

    Args:
      weight: values [x, i, f], scales [x, k, g].
    """
    count, group = x_xni.shape[1], weight.block[1]
    wide = at_least_float32(x_xni.dtype)
    sums_are_smaller = count * wide.itemsize < group * x_xni.dtype.itemsize
    default = _scaled_expert_sums if sums_are_smaller else _experts_in_parts
    is_grouped = weight.scale.shape[2] == weight.shape[2]
    is_many = count > min(group // 2, MOST_SUMMED)
    on_tpu = _scaled_experts if is_grouped and is_many else _scaled_expert_sums
    return lax.platform_dependent(x_xni, weight, tpu=on_tpu, default=default)


def widened(weight: Any, dtype: Any) -> jax.Array:
    """Returns the numbers that a weight stands for, computed in float32 at least and rounded once."""
    wide, numbers = at_least_float32(dtype), weight.values.astype(at_least_float32(dtype))
    if weight.zero is not None:
        numbers -= _spread(weight.zero, weight.shape, wide)
    numbers *= _spread(weight.scale if weight.outer is None else _scales(weight, wide), weight.shape, wide)
    if weight.minimum is not None:
        numbers -= _spread(_minimums(weight, wide), weight.shape, wide)
    return numbers.astype(dtype)


def _scales(weight: Any, wide: Any) -> jax.Array:
    scale = weight.scale.astype(wide)
    if weight.outer is None:
        return scale
    outer = _repeated(weight.outer.astype(wide), scale.shape)
    return scale / outer if weight.is_divisor else scale * outer


def _minimums(weight: Any, wide: Any) -> jax.Array:
    minimum = weight.minimum.astype(wide)
    if weight.outer_minimum is None:
        return minimum
    return minimum * _repeated(weight.outer_minimum.astype(wide), minimum.shape)


def _repeated(part: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Repeats each axis to a size."""
    for axis, size in enumerate(shape):
        if size != part.shape[axis]:
            part = jnp.repeat(part, size // part.shape[axis], axis=axis)
    return part


def _spread(part: jax.Array, shape: tuple[int, ...], wide: Any) -> jax.Array:
    """Returns numbers of blocks repeated to a weight's shape, in a wide dtype."""
    axes = [axis for axis, size in enumerate(shape) if size != part.shape[axis]]

    def by_product(part: jax.Array) -> jax.Array:
        """Multiplies with zeros and ones, which changes no number: in bfloat16 if that holds all of them."""
        (axis,), is_narrow = axes, part.dtype.name in NARROW
        part = jnp.moveaxis(part.astype(jnp.bfloat16 if is_narrow else wide), axis, -1)
        count, times = part.shape[-1], shape[axis] // part.shape[-1]
        local = count // math.gcd(count, _model_ways())  # groups of a shard
        depth = next(depth for depth in range(min(DEPTH, local), 0, -1) if local % depth == 0)
        ones = jnp.repeat(jnp.eye(depth, dtype=part.dtype), times, axis=1)
        precision = None if is_narrow else lax.Precision.HIGHEST
        part = part.reshape(*part.shape[:-1], -1, depth)
        spread = jnp.einsum("...d,dz->...z", part, ones, precision=precision, preferred_element_type=wide)
        return jnp.moveaxis(spread.reshape(*part.shape[:-2], -1), -1, axis)

    def by_broadcast(part: jax.Array) -> jax.Array:
        return _repeated(part.astype(wide), shape)

    return lax.platform_dependent(part, default=by_broadcast, **({"tpu": by_product} if len(axes) == 1 else {}))


def _scaled_sums(x_ni: jax.Array, weight: Any) -> jax.Array:
    scale = _scales(weight, at_least_float32(x_ni.dtype))
    x_nkz = x_ni.reshape(x_ni.shape[0], scale.shape[-1], -1)
    values = weight.values.reshape(*scale.shape, -1).astype(x_ni.dtype)
    y_kn = _einsum("nkz,...kz->kn...", x_nkz, values)
    y = jnp.sum(y_kn * jnp.moveaxis(scale, -1, 0)[:, None], axis=0)
    return _less_offset("nk,...k->n...", y, x_ni, weight, scale)


def _scaled_sums_of_parts(x_ni: jax.Array, weight: Any) -> jax.Array:
    """Like `_scaled_sums`, but multiplies each vector's groups as vectors with zeros elsewhere, and the weight as it is."""
    scale = _scales(weight, at_least_float32(x_ni.dtype))
    count, (groups, group) = x_ni.shape[0], (scale.shape[-1], weight.block[-1])
    x_nkkz = jnp.where(jnp.eye(groups, dtype=bool)[:, :, None], x_ni.reshape(count, 1, groups, group), 0)
    y = _einsum("mi,...i->m...", x_nkkz.reshape(count * groups, -1), weight.values.astype(x_ni.dtype))
    y = jnp.sum(y.reshape(count, groups, *y.shape[1:]) * jnp.moveaxis(scale, -1, 0), axis=1)
    return _less_offset("nk,...k->n...", y, x_ni, weight, scale)


def _less_offset(equation: str, y: jax.Array, x: jax.Array, weight: Any, scale: jax.Array) -> jax.Array:
    """Subtracts what zero points and minimums add to a product; `equation`: of the sums of inputs by group with them."""
    parts = [] if weight.zero is None else [_repeated(weight.zero.astype(scale.dtype), scale.shape) * scale]
    parts += [] if weight.minimum is None else [_minimums(weight, scale.dtype)]
    if not parts:
        return y
    count = scale.shape[1] if equation.startswith("x") else scale.shape[-1]
    sums = jnp.sum(x.reshape(*x.shape[:-1], count, -1), axis=-1, dtype=scale.dtype)
    return y - jnp.einsum(equation, sums, sum(parts), precision=lax.Precision.HIGHEST)


def _scaled_weight(x_ni: jax.Array, weight: Any) -> jax.Array:
    """Offsets are subtracted from the sums: a second array of a weight's size would take a TPU three times as long."""
    y = _einsum("ni,...i->n...", x_ni, widened(weight.replace(zero=None, minimum=None), x_ni.dtype))
    return _less_offset("nk,...k->n...", y, x_ni, weight, _scales(weight, y.dtype))


def _doubled(form: Any, x_ni: jax.Array, weight: Any) -> jax.Array:
    """Adds a vector of zeros to the vector of each device, which TPUs multiply slowly (`products`)."""
    return form(_with_zeros(x_ni), weight)[::2]


def _with_zeros(x_ni: jax.Array) -> jax.Array:
    """Appends zeros to each vector, beside it, so on its device."""
    return jnp.pad(x_ni[:, None], ((0, 0), (0, 1), (0, 0))).reshape(-1, x_ni.shape[1])


def _weight_in_parts(x_ni: jax.Array, weight: Any) -> jax.Array:
    """Widens a part of the longest output axis at a time; every part has indices of all shards of a mesh."""
    outputs = weight.shape[:-1]
    axis = max(range(len(outputs)), key=lambda axis: outputs[axis])
    parts = _count_parts(outputs[axis], _model_ways())
    split = jax.tree.map(lambda a: a.reshape(*a.shape[:axis], -1, parts, *a.shape[axis + 1 :]), weight)

    def multiply(index: jax.Array) -> jax.Array:
        part = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, axis + 1, keepdims=False), split)
        return products.product("ni,...i->n...", x_ni, widened(part, x_ni.dtype), at_least_float32(x_ni.dtype))

    y = lax.map(multiply, jnp.arange(parts))  # [parts, n, outputs...]
    return jnp.moveaxis(y, 0, axis + 2).reshape(-1, *outputs)


def _scaled_expert_sums(x_xni: jax.Array, weight: Any) -> jax.Array:
    experts, count, _ = x_xni.shape
    scale_xkg = _scales(weight, at_least_float32(x_xni.dtype))
    x_xnkz = x_xni.reshape(experts, count, scale_xkg.shape[1], -1)
    values_xkzf = weight.values.reshape(experts, scale_xkg.shape[1], -1, weight.shape[-1])
    y_xknf = _einsum("xnkz,xkzf->xknf", x_xnkz, values_xkzf.astype(x_xni.dtype))
    y_xkngb = y_xknf.reshape(*y_xknf.shape[:3], scale_xkg.shape[2], -1)
    y_xnf = jnp.sum(y_xkngb * scale_xkg[:, :, None, :, None], axis=1).reshape(experts, count, -1)
    return _less_offset("xnk,xkf->xnf", y_xnf, x_xni, weight, scale_xkg)


def _scaled_experts(x_xni: jax.Array, weight: Any) -> jax.Array:
    y_xnf = _einsum("xni,xif->xnf", x_xni, widened(weight.replace(zero=None, minimum=None), x_xni.dtype))
    return _less_offset("xnk,xkf->xnf", y_xnf, x_xni, weight, _scales(weight, y_xnf.dtype))


def _experts_in_parts(x_xni: jax.Array, weight: Any) -> jax.Array:
    experts, count, _ = x_xni.shape
    split = jax.tree.map(lambda a: a.reshape(_count_parts(experts, 1), -1, *a.shape[1:]), (x_xni, weight))

    def multiply(part: tuple[jax.Array, Any]) -> jax.Array:
        x_xni, weight = part[0], in_order(part[1])
        return _einsum("xni,xif->xnf", x_xni, widened(weight, x_xni.dtype))

    return lax.map(multiply, (split[0], in_order(split[1]))).reshape(experts, count, -1)


def in_order(weight: Any) -> Any:
    """Returns weights in the layout that they have. XLA would copy whole ones into another, those of all layers at once."""
    return jax.tree.map(lambda x: with_layout_constraint(x, Layout(tuple(range(x.ndim)))), weight)


def _single(x_ni: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
    """Multiplies one vector per device. A TPU would write a float32 copy of some weights for it, but nothing for two."""

    def doubled(x_ni: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
        return _scaled_inputs(_with_zeros(x_ni), values, scale)[..., ::2, :]

    arrays = x_ni, values, scale
    if x_ni.shape[0] == 1:
        return lax.platform_dependent(*arrays, cuda=_scaled_inputs, default=doubled)
    return lax.platform_dependent(*arrays, tpu=doubled, default=_scaled_inputs)


def _scaled_inputs(x_ni: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
    blocks = x_ni.reshape(x_ni.shape[0], scale.shape[-1], -1) * scale[..., None, :, None].astype(x_ni.dtype)
    return _einsum("...ni,...bi->...nb", blocks.reshape(*scale.shape[:-1], *x_ni.shape), values.astype(x_ni.dtype))


def _in_parts(x_ni: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
    """Scales a part of the longest axis of blocks at a time; every part has indices of all shards of a mesh."""
    (*outer, _), scale = scale.shape, scale[..., None, :]
    axis = max(range(len(outer)), key=lambda axis: outer[axis])
    parts = _count_parts(outer[axis], _model_ways())
    values, scale = (a.reshape(*a.shape[:axis], -1, parts, *a.shape[axis + 1 :]) for a in (values, scale))

    def multiply(index: jax.Array) -> jax.Array:
        values_bi, scale_k = (lax.dynamic_index_in_dim(a, index, axis + 1, keepdims=False) for a in (values, scale))
        return _einsum("ni,...bi->...nb", x_ni, scaled(values_bi, scale_k, x_ni.dtype))

    y = lax.map(multiply, jnp.arange(parts))
    return jnp.moveaxis(y, 0, axis + 1).reshape(*outer, *y.shape[-2:])


def scaled(values: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """Returns values * scale, each axis of the scale repeated to that of the values, rounded once from float32 at least."""
    wide = at_least_float32(dtype)
    return (values.astype(wide) * _repeated(scale.astype(wide), values.shape)).astype(dtype)


def _model_ways() -> int:
    """Returns the number of devices along the mesh's model axis."""
    mesh = sharding.current()
    return 1 if mesh is None else dict(mesh.shape).get("model", 1)


def _count_parts(size: int, ways: int) -> int:
    """Returns the smallest divisor of a shard's part of an axis that is at least PARTS; all of a shorter one."""
    local = size // math.gcd(size, ways)
    return next(parts for parts in range(min(PARTS, local), local + 1) if local % parts == 0)


def _einsum(equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(equation, left, right, preferred_element_type=at_least_float32(left.dtype))
