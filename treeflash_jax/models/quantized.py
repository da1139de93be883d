"""Weight-only quantisation: a verifier's matrices in 8 bits, with scales.

w ~ values * scale. Scheme "int8" has a scale per output channel, max |w| / 127 over the axes that a product sums over
(`Spec.inputs`); "fp8" has float8_e4m3fn values and a scale per block of 128 outputs and 128 inputs, max |w| / 448 or that
of a file (`formats.fp8`), and leaves the vocabulary tables as they are, as published FP8 files do. No dequantised weight is
stored: products scale what goes in or comes out. Norms stay as they are.

The quantised verifier is a model of its own: drafted output equals ITS one-token output, not that of the wider weights.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from treeflash_jax.core import programs, sharding
from treeflash_jax.core.checks import quoted
from treeflash_jax.core.dtypes import at_least_float32
from treeflash_jax.core.parameters import Spec, is_spec
from treeflash_jax.models.backend import block_products, indexing, products

DTYPES = {"int8": jnp.dtype(jnp.int8), "fp8": jnp.dtype(jnp.float8_e4m3fn)}
SCHEMES = tuple(DTYPES)
NONE = "none"  # in settings: no scheme, also for FP8 files
LARGEST = {"int8": 127, "fp8": 448}
SCALE_BLOCK = 128  # outputs and inputs of a block


@struct.dataclass
class Quantized:
    """A weight in 8 bits that stands in for an array: `shape` is the weight's, `dtype` the one it computes in.

    Attributes:
      values: int8 or float8_e4m3fn, of the weight's shape.
      scale: of the output axes; or of blocks, with as many axes as the weight, each divided into equal parts. It has the
        compute dtype, so that the weights still determine the dtype of caches and activations. Values made here are rounded
        against the scale as it is stored, so a narrow one costs no accuracy; the scales of files are rounded to it, which
        changes a weight by no more than rounding the weight to that dtype would.
    """

    values: Any
    scale: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> Any:
        return self.scale.dtype

    @property
    def block(self) -> tuple[int, ...] | None:
        """The size of a block along each axis; None for a scale per output channel."""
        if len(self.scale.shape) < len(self.shape):
            return None
        return tuple(size // count for size, count in zip(self.shape, self.scale.shape, strict=True))

    def reshape(self, *shape: int) -> Self:
        """Folds or splits input axes, and folds those of blocks; output axes stay."""
        scale = self.scale if self.block is None else self.scale.reshape(self.scale.shape[0], -1)
        return self.replace(values=self.values.reshape(*shape), scale=scale)


def check_scheme(scheme: str | None) -> None:
    """Raises ValueError for a scheme that is neither None nor one of SCHEMES."""
    if scheme is not None and not (isinstance(scheme, str) and scheme in SCHEMES):
        raise ValueError(f"got quantize {quoted(scheme)}, expected None or {' or '.join(map(repr, SCHEMES))}")


def quantization_scheme(weights: Any) -> str | None:
    """Returns the scheme of a tree of weights; None if nothing in it is quantised."""
    for leaf in jax.tree.leaves(weights, is_leaf=_is_quantized):
        if _is_quantized(leaf):
            return next(scheme for scheme, dtype in DTYPES.items() if leaf.values.dtype == dtype)
    return None


def specs(tree: Any, scheme: str | None, mesh: Any = None) -> Any:
    """Returns specs of the quantised weights: a Quantized of two Specs for every matrix. Scheme None changes nothing.

    Args:
      mesh: mesh whose shards have whole blocks; None: one device.
    """
    check_scheme(scheme)
    return jax.tree.map(
        lambda spec: _quantized_spec(spec, scheme, mesh) if applies(scheme, spec) else spec, tree, is_leaf=is_spec
    )


def specs_like(tree: Any, weights: Any) -> Any:
    """Returns the specs of partly quantised weights, given the specs of all of them as arrays."""

    def like(spec: Spec, weight: Any) -> Any:
        if not _is_quantized(weight):
            return spec
        made = _quantized_spec(spec, "int8" if weight.block is None else "fp8", None)
        return made.replace(scale=replace(made.scale, shape=weight.scale.shape))

    return jax.tree.map(like, tree, weights, is_leaf=is_spec)


def applies(scheme: str | None, spec: Spec) -> bool:
    """Returns True if a scheme quantises the weight."""
    is_kept = scheme is None or (scheme == "fp8" and "vocab" in spec.axes)
    return bool(spec.inputs) and spec.can_quantize and not is_kept


def count_blocks(spec: Spec, mesh: Any = None, sizes: tuple[int, int] = (SCALE_BLOCK, SCALE_BLOCK)) -> tuple[int, ...]:
    """Returns the number of blocks along each axis of a weight; a shard of a mesh has a whole number of them.

    Blocks of `sizes` outputs and inputs, as files have, divide the last output and the last input axis. If they do not
    divide a shard of it, they are the largest parts of such blocks that do. Every index of other axes has blocks.
    """
    counts = list(spec.shape)
    shard = spec.shape if mesh is None else sharding.sharding(spec.axes, spec.shape, mesh).shard_shape(spec.shape)
    for axis, size in zip((_outputs(spec)[-1], spec.inputs[-1]), sizes, strict=True):
        counts[axis] //= math.gcd(shard[axis], size)
    return tuple(counts)


def quantize(weight: jax.Array, inputs: tuple[int, ...], counts: tuple[int, ...] | None = None) -> Quantized:
    """Rounds a weight to int8 with a scale per channel: |w - values * scale| <= scale / 2. Channels of zeros get scale 0.

    The scale has the weight's dtype and its axes except `inputs`, the axes that a product sums over.

    Args:
      counts: number of blocks along each axis; rounds to float8_e4m3fn instead, with a scale per block, [*counts].

    Both round half to even.
    """
    scheme = "int8" if counts is None else "fp8"
    parts = counts or tuple(1 if axis in inputs else size for axis, size in enumerate(weight.shape))
    split = [part for size, count in zip(weight.shape, parts, strict=True) for part in (count, size // count)]
    wide = weight.astype(at_least_float32(weight.dtype)).reshape(split)
    kept = jnp.finfo(weight.dtype)
    # A factor, since XLA compiles a quotient by a constant in another way than it runs one. No pair of casts: XLA may drop
    # it, and values would be those of another scale than the stored one.
    within = tuple(range(1, len(split), 2))
    scale = jnp.max(jnp.abs(wide), axis=within, keepdims=True) * (1 / LARGEST[scheme])
    scale = lax.reduce_precision(scale, kept.nexp, kept.nmant)
    steps = wide / jnp.where(scale > 0, scale, 1)
    steps = jnp.round(steps) if scheme == "int8" else steps
    values = jnp.clip(steps, -LARGEST[scheme], LARGEST[scheme]).astype(DTYPES[scheme]).reshape(weight.shape)
    scale = scale.reshape(parts).astype(weight.dtype)
    return Quantized(values, jnp.squeeze(scale, inputs) if counts is None else scale)


def compress(weight: jax.Array, spec: Spec, scheme: str | None, mesh=None) -> Any:
    """Quantises a weight, in place on its devices, if the scheme applies to it.

    Waits for the result, so that devices hold one wide weight at a time.
    """
    if not applies(scheme, spec):
        return weight
    return jax.block_until_ready(programs.call(_compress, weight, mesh=mesh, spec=spec, scheme=scheme))


@partial(jax.jit, static_argnames=("spec", "scheme"))
def _compress(weight: jax.Array, spec: Spec, scheme: str) -> Quantized:
    mesh = sharding.current()
    counts = count_blocks(spec, mesh) if scheme == "fp8" else None
    made = quantize(weight, spec.inputs, counts)
    return jax.tree.map(lambda x, part: sharding.constrain(x, part.axes), made, _quantized_spec(spec, scheme, mesh))


def can_join(*weights: Any) -> bool:
    """Returns True if weights can be concatenated: none is quantised, or all with a scale per channel or equal blocks."""
    return len({(_is_quantized(weight), weight.block if _is_quantized(weight) else None) for weight in weights}) == 1


def product(equation: str, x: jax.Array, weight: jax.Array | Quantized, dtype: Any = None) -> jax.Array:
    """Returns an einsum of activations with a weight whose output axes come last; see `products.product`.

    Of a weight with blocks, the last axis is the one that is summed over.
    """
    if not isinstance(weight, Quantized):
        return products.product(equation, x, weight, dtype)
    # Tied to x: XLA would convert the values of all layers ahead of a decoding loop and hold them, wide, to its end.
    x, values = lax.optimization_barrier((x, weight.values))
    dtype = dtype or x.dtype
    if weight.block is not None:
        return block_products.product(x, values, weight.scale, dtype)
    wide = jnp.float32 if dtype == jnp.float16 else dtype  # sums of x with values up to 127 or 448 overflow float16
    return (products.product(equation, x, values.astype(x.dtype), wide) * weight.scale.astype(wide)).astype(dtype)


def lookup(table: jax.Array | Quantized, ids: jax.Array) -> jax.Array:
    """Returns vectors of a table by id, [..., d]."""
    if not isinstance(table, Quantized):
        return indexing.lookup(table, ids)
    # XLA reads one vector by a slice, for which a TPU would copy the whole int8 table; it gathers two in place.
    values = table.values[jnp.stack([ids, ids])][0] if ids.size == 1 else table.values[ids]
    return values.astype(table.dtype) * table.scale[ids][..., None]


def _is_quantized(x: Any) -> bool:
    return isinstance(x, Quantized)


def _outputs(spec: Spec) -> list[int]:
    return [axis for axis in range(len(spec.shape)) if axis not in spec.inputs]


def _quantized_spec(spec: Spec, scheme: str, mesh: Any) -> Quantized:
    values = replace(spec, inputs=(), dtype=DTYPES[scheme])
    if scheme == "fp8":
        return Quantized(values, Spec(count_blocks(spec, mesh), spec.axes, "ones"))
    shape, axes = (tuple(values[axis] for axis in _outputs(spec)) for values in (spec.shape, spec.axes))
    return Quantized(values, Spec(shape, axes, "ones"))
