"""Weight-only quantisation: a verifier's matrices in 8 or 4 bits, with scales.

A weight is approximately values * scale:

| scheme | values | a scale for each | scale | stay as they are |
|---|---|---|---|---|
| int8 | int8 | output channel | largest / 127 | norms |
| fp8 | float8_e4m3fn | block of 128 outputs and 128 inputs | largest / 448 | norms, vocabulary tables |
| int4 | int4 | output and group of 128 inputs | largest / 7 | norms, vocabulary tables |
| mxfp4 | float4_e2m1fn | output and group of 32 inputs | a power of two | everything but experts |

`largest` is the maximum of absolute weights. Inputs are the axes that a product sums over (`Spec.inputs`). With the power
of two, the largest weight becomes 4 to 8, and is then rounded to 6 at most. Most published files do not quantise vocabulary
tables either.

Weights of quantised files keep the files' scales and groups (`formats.kept_weights`). Products apply the scales to their
inputs or outputs, to one part of the weight after the other, or to the weight while reading it. No product stores a whole
dequantised weight. For groups of 32 on TPUs, see `notebooks/results/four_bits.md`.

The quantised verifier is another model: drafted output equals the one-token output of the quantised verifier, not of the
original.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike

from treeflash_jax.core import programs, sharding
from treeflash_jax.core.dtypes import at_least_float32, bits
from treeflash_jax.core.error_text import quoted
from treeflash_jax.core.parameters import Params, Spec, is_spec
from treeflash_jax.models.backend import block_products, block_scales, indexing, products
from treeflash_jax.models.quantized_weight import Quantized, is_quantized

DTYPES = {
    "int8": jnp.dtype(jnp.int8),
    "fp8": jnp.dtype(jnp.float8_e4m3fn),
    "int4": jnp.dtype(jnp.int4),
    "mxfp4": jnp.dtype(jnp.float4_e2m1fn),
}
SCHEMES = tuple(DTYPES)
NO_SCHEME = "none"  # value of settings: no scheme, even for quantised files
LARGEST = {"int8": 127, "fp8": 448, "int4": 7, "mxfp4": 6}
SCALE_BLOCK = 128
BLOCKS = {"fp8": (SCALE_BLOCK, SCALE_BLOCK), "int4": (1, SCALE_BLOCK), "mxfp4": (1, 32)}  # outputs and inputs of a block


def check_scheme(scheme: str | None) -> None:
    """Raises ValueError for a scheme other than None and SCHEMES."""
    if scheme is not None and not (isinstance(scheme, str) and scheme in SCHEMES):
        raise ValueError(f"got quantize {quoted(scheme)}, expected None or {' or '.join(map(repr, SCHEMES))}")


def quantization_scheme(weights: Any) -> str | None:
    """Returns the scheme of a tree of weights; among several, the scheme with fewest bits. None: nothing is quantised."""
    leaves = [leaf for leaf in jax.tree.leaves(weights, is_leaf=is_quantized) if is_quantized(leaf)]
    schemes = {_find_scheme(leaf) for leaf in leaves}
    return next((scheme for scheme in reversed(SCHEMES) if scheme in schemes), None)


def _find_scheme(weight: Quantized) -> str:
    dtype = weight.values.dtype
    if bits(dtype) == 4 and weight.scale.dtype != jnp.float8_e8m0fnu:
        return "int4"
    return next(scheme for scheme in SCHEMES if DTYPES[scheme] == dtype)


def specs(tree: Any, scheme: str | None, mesh: Mesh | None = None) -> Any:
    """Returns specs of the quantised weights, with a Quantized of two Specs for every matrix. Scheme None changes nothing.

    Args:
      mesh: mesh on which every shard has whole blocks; None: one device.
    """
    check_scheme(scheme)
    return jax.tree.map(
        lambda spec: _quantized_spec(spec, scheme, mesh) if applies(scheme, spec) else spec, tree, is_leaf=is_spec
    )


def specs_like(tree: Any, weights: Any) -> Any:
    """Returns the specs of partly quantised weights from the specs of unquantised ones."""

    def like(spec: Spec, weight: Any) -> Any:
        if not is_quantized(weight):
            return spec
        outputs = tuple(spec.axes[axis] for axis in _outputs(spec))
        axes = {len(spec.shape): spec.axes, len(outputs): outputs}
        parts = weight.replace(order=None)
        parts = jax.tree.map(lambda part: Spec(part.shape, axes[len(part.shape)], "ones", dtype=part.dtype), parts)
        return parts if weight.order is None else parts.replace(order=Spec(weight.order.shape, (None,), dtype=jnp.int32))

    return jax.tree.map(like, tree, weights, is_leaf=is_spec)


def expand(tree: Any, weights: Any) -> Any:
    """Returns weights of these specs as arrays. Dequantises quantised ones and puts their inputs in the specs' order."""

    def leaf(spec: Spec, weight: Any) -> Any:
        if not is_quantized(weight):
            return weight
        if weight.block is None:
            weight = weight.replace(scale=jnp.expand_dims(weight.scale, spec.inputs))
        wide = block_scales.widen(weight.replace(order=None), weight.dtype)
        if weight.order is None:
            return wide
        return wide.reshape(-1, weight.order.size)[:, jnp.argsort(weight.order)].reshape(wide.shape)

    return jax.tree.map(leaf, tree, weights, is_leaf=is_spec)


def with_partitions(weights: Params, *trees: dict[str, Spec]) -> Params:
    """Returns a layer's weights. Quantised weights get the partition that the spec of their shape has on the ambient mesh.

    Args:
      trees: specs by name; a weight may have several specs, for example merged and unmerged.
    """
    mesh = sharding.current()

    def with_partition(name: str, weight: Any) -> Any:
        spec = next((tree[name] for tree in trees if name in tree and tree[name].shape == weight.shape), None)
        if spec is None or not is_quantized(weight):
            return weight
        axes = tuple(None if axis == "embed" else axis for axis in spec.axes)  # a pass reads all of the model width
        return weight.replace(partition=tuple(sharding.partition(axes, spec.shape, mesh)))

    if block_scales.model_ways() == 1:
        return weights
    return {name: with_partition(name, weight) for name, weight in weights.items()}


def applies(scheme: str | None, spec: Spec) -> bool:
    """Returns whether a scheme quantises the weight."""
    if scheme is None or not spec.inputs or not spec.can_quantize:
        return False
    if scheme == "mxfp4":
        return "experts" in spec.axes and "vocab" not in spec.axes
    return scheme == "int8" or "vocab" not in spec.axes


def count_blocks(
    spec: Spec, mesh: Mesh | AbstractMesh | None = None, sizes: tuple[int, int] = BLOCKS["fp8"]
) -> tuple[int, ...]:
    """Returns the number of blocks along each axis of a weight. Every shard of a mesh has a whole number of blocks.

    Blocks have `sizes` outputs and inputs, as in files. They divide the last output axis and the input axes, which count as
    one axis. If they do not divide a shard, the largest parts of such blocks that divide it are used. Every index of the
    other axes has separate blocks.
    """
    counts = list(spec.shape)
    shard = spec.shape if mesh is None else sharding.sharding(spec.axes, spec.shape, mesh).shard_shape(spec.shape)
    last = _outputs(spec)[-1]
    counts[last] //= math.gcd(shard[last], sizes[0])
    size = math.gcd(math.prod(shard[axis] for axis in spec.inputs), sizes[1])
    for axis in reversed(spec.inputs):  # a block has part of the last axis, or all of it and part of the axis before
        part = math.gcd(shard[axis], size)
        counts[axis] //= part
        size = size // part if part == shard[axis] else 1
    return tuple(counts)


def quantize_channels(weight: jax.Array, inputs: tuple[int, ...]) -> Quantized:
    """Rounds a weight to int8 with a scale per output channel: |w - values * scale| <= scale / 2.

    The scale has the weight's dtype, and all axes except `inputs`, the axes that a product sums over. Halves are rounded to
    even. Channels that are all zero get scale 0.
    """
    counts = tuple(1 if axis in inputs else size for axis, size in enumerate(weight.shape))
    weight = quantize_blocks(weight, counts, "int8")
    return weight.replace(scale=jnp.squeeze(weight.scale, inputs))


def quantize_blocks(weight: jax.Array, counts: tuple[int, ...], scheme: str) -> Quantized:
    """Rounds a weight to the values of a scheme with a scale per block.

    The scale is [*counts], in the weight's dtype ("mxfp4": float8_e8m0fnu). Halves are rounded to even. Blocks that are all
    zero get scale 0, except in "mxfp4".

    Args:
      counts: number of blocks along each axis.
    """
    block_shape = [part for size, count in zip(weight.shape, counts, strict=True) for part in (count, size // count)]
    block_axes = tuple(range(1, len(block_shape), 2))
    wide = weight.astype(at_least_float32(weight.dtype)).reshape(block_shape)
    largest = jnp.max(jnp.abs(wide), axis=block_axes, keepdims=True)
    if scheme == "mxfp4":
        return _round_to_mxfp4(weight, wide, largest, counts)
    # This multiplies, because jitted code and code outside of `jit` divide by a constant in different ways.
    # `reduce_precision` rounds, because XLA may drop a pair of casts; values would then be made for another scale than the
    # stored one. It flushes subnormal numbers to 0, as which float16 would store the scales of small weights. So scales are
    # at least the smallest normal number.
    float_info = jnp.finfo(weight.dtype)
    scale = jnp.where(largest > 0, jnp.maximum(largest * (1 / LARGEST[scheme]), float_info.tiny), 0)
    scale = lax.reduce_precision(scale, float_info.nexp, float_info.nmant)
    steps = wide / jnp.where(scale > 0, scale, 1)
    steps = steps if scheme == "fp8" else jnp.round(steps)
    values = jnp.clip(steps, -LARGEST[scheme], LARGEST[scheme]).astype(DTYPES[scheme]).reshape(weight.shape)
    return Quantized(values, scale.reshape(counts).astype(weight.dtype))


def _round_to_mxfp4(weight: jax.Array, wide: jax.Array, largest: jax.Array, counts: tuple[int, ...]) -> Quantized:
    """Rounds as in the OCP Microscaling Formats (MX) specification v1.0, section 6.3."""
    exponent = jnp.clip(jnp.frexp(largest)[1] - 3, -126, 127)  # 1 is 0.5 * 2^1, and the largest power in E2M1 is 2^2
    steps = jnp.clip(jnp.ldexp(wide, -exponent), -LARGEST["mxfp4"], LARGEST["mxfp4"])
    scale = jnp.ldexp(jnp.ones((), wide.dtype), exponent).astype(jnp.float8_e8m0fnu).reshape(counts)
    return Quantized(steps.astype(DTYPES["mxfp4"]).reshape(weight.shape), scale, compute_dtype=weight.dtype)


def compress(weight: jax.Array, spec: Spec, scheme: str | None, mesh: Mesh | None = None) -> Any:
    """Quantises a weight on its devices if the scheme applies to it.

    Waits for the result, so that devices hold only one wide weight at a time.
    """
    if not applies(scheme, spec):
        return weight
    return jax.block_until_ready(programs.call(_compress, weight, mesh=mesh, spec=spec, scheme=scheme))


@partial(jax.jit, static_argnames=("spec", "scheme"))
def _compress(weight: jax.Array, spec: Spec, scheme: str) -> Quantized:
    mesh = sharding.current()
    if scheme == "int8":
        quantized = quantize_channels(weight, spec.inputs)
    else:
        quantized = quantize_blocks(weight, count_blocks(spec, mesh, BLOCKS[scheme]), scheme)
    parts = _quantized_spec(spec, scheme, mesh).replace(compute_dtype=quantized.compute_dtype)
    return jax.tree.map(lambda x, part: sharding.constrain(x, part.axes), quantized, parts)


def product(equation: str, x: jax.Array, weight: jax.Array | Quantized, dtype: DTypeLike | None = None) -> jax.Array:
    """Returns an einsum of activations with a weight whose output axes come last; see `products.dense_product`.

    If a weight has blocks, its last axis must be the axis to sum over.
    """
    if not isinstance(weight, Quantized):
        return products.dense_product(equation, x, weight, dtype)
    # The barrier ties values to x. Otherwise XLA converts the values of all layers before a decoding loop and keeps them
    # wide.
    x, weight = lax.optimization_barrier((x, weight))
    dtype = dtype or x.dtype
    if weight.block is not None:
        if weight.order is not None:
            x = jnp.take(x, weight.order, axis=-1)
            weight = weight.replace(order=None)
        return block_products.block_product(x, weight, dtype)
    wide = jnp.float32 if dtype == jnp.float16 else dtype  # sums of x with values up to 127 or 448 overflow float16
    return (products.dense_product(equation, x, weight.values.astype(x.dtype), wide) * weight.scale.astype(wide)).astype(
        dtype
    )


def lookup(table: jax.Array | Quantized, ids: jax.Array) -> jax.Array:
    """Returns vectors of a table by id, [..., d]."""
    if not isinstance(table, Quantized):
        return indexing.lookup(table, ids)
    # To read one vector, XLA would use a slice, for which a TPU copies the whole int8 table. Two vectors are gathered in
    # place.
    pick = (lambda part: part[jnp.stack([ids, ids])][0]) if ids.size == 1 else (lambda part: part[ids])
    vectors = jax.tree.map(pick, table)
    if table.block is not None:
        return block_scales.widen(vectors, table.dtype)
    return (vectors.values.astype(table.dtype) * vectors.scale[..., None]).astype(table.dtype)


def _outputs(spec: Spec) -> list[int]:
    return [axis for axis in range(len(spec.shape)) if axis not in spec.inputs]


def _quantized_spec(spec: Spec, scheme: str, mesh: Mesh | AbstractMesh | None) -> Quantized:
    values = replace(spec, inputs=(), dtype=DTYPES[scheme])
    if scheme in BLOCKS:
        dtype = jnp.dtype(jnp.float8_e8m0fnu) if scheme == "mxfp4" else None
        return Quantized(values, Spec(count_blocks(spec, mesh, BLOCKS[scheme]), spec.axes, "ones", dtype=dtype))
    shape = tuple(spec.shape[axis] for axis in _outputs(spec))
    axes = tuple(spec.axes[axis] for axis in _outputs(spec))
    return Quantized(values, Spec(shape, axes, "ones"))
