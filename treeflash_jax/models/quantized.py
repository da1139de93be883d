"""Weight-only quantisation: a verifier's matrices as int8 values and one scale per output channel.

w ~ values * scale, where scale = max |w| / 127 over the axes that a product sums over (`Spec.inputs`). Products run on the
values in the activations' dtype and are scaled afterwards: no dequantised weight is stored. Norms stay as they are.

The quantised verifier is a model of its own: drafted output equals ITS one-token output, not that of the wider weights.
"""

from dataclasses import replace
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from treeflash_jax.core import programs, sharding
from treeflash_jax.core.checks import quoted
from treeflash_jax.core.parameters import Spec, is_spec
from treeflash_jax.models.backend import indexing, products

SCHEMES = ("int8",)
LARGEST = 127


@struct.dataclass
class Quantized:
    """A weight in int8 that stands in for an array: `shape` is the weight's, `dtype` the one it computes in.

    Attributes:
      values: int8, of the weight's shape.
      scale: of the output axes, in the compute dtype. Values are rounded against the scale as it is stored, so a narrow one
        costs no accuracy, and the weights still determine the dtype of caches and activations.
    """

    values: Any
    scale: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> Any:
        return self.scale.dtype

    def reshape(self, *shape: int) -> Self:
        """Folds or splits input axes; output axes and scale stay."""
        return self.replace(values=self.values.reshape(*shape))


def check_scheme(scheme: str | None) -> None:
    """Raises ValueError for a scheme that is neither None nor one of SCHEMES."""
    if scheme is not None and not (isinstance(scheme, str) and scheme in SCHEMES):
        raise ValueError(f"got quantize {quoted(scheme)}, expected None or {' or '.join(map(repr, SCHEMES))}")


def quantization_scheme(weights: Any) -> str | None:
    """Returns the scheme of a tree of weights; None if nothing in it is quantised."""
    leaves = jax.tree.leaves(weights, is_leaf=lambda x: isinstance(x, Quantized))
    return SCHEMES[0] if any(isinstance(leaf, Quantized) for leaf in leaves) else None


def specs(tree: Any, scheme: str | None) -> Any:
    """Returns specs of the quantised weights: a Quantized of two Specs for every matrix. Scheme None changes nothing."""
    check_scheme(scheme)
    if scheme is None:
        return tree
    return jax.tree.map(lambda spec: _parts(spec) if spec.inputs and spec.can_quantize else spec, tree, is_leaf=is_spec)


def quantize(weight: jax.Array, inputs: tuple[int, ...]) -> Quantized:
    """Rounds a weight to int8, half to even: |w - values * scale| <= scale / 2. Channels of zeros get scale 0.

    The scale has the weight's dtype and its axes but for `inputs`, those that a product sums over.
    """
    wide = weight.astype(jnp.promote_types(weight.dtype, jnp.float32))
    kept = jnp.finfo(weight.dtype)
    # A factor, since XLA compiles a quotient by a constant in another way than it runs one. No pair of casts: XLA may drop
    # it, and values would be those of another scale than the stored one.
    scale = jnp.max(jnp.abs(wide), axis=inputs, keepdims=True) * (1 / LARGEST)
    scale = lax.reduce_precision(scale, kept.nexp, kept.nmant)
    steps = jnp.round(wide / jnp.where(scale > 0, scale, 1))
    values = jnp.clip(steps, -LARGEST, LARGEST).astype(jnp.int8)
    return Quantized(values=values, scale=jnp.squeeze(scale, inputs).astype(weight.dtype))


def compress(weight: jax.Array, spec: Spec, scheme: str | None, mesh=None) -> Any:
    """Quantises a weight, in place on its devices, if the scheme applies to it.

    Waits for the result, so that devices hold one wide weight at a time.
    """
    if scheme is None or not (spec.inputs and spec.can_quantize):
        return weight
    return jax.block_until_ready(programs.call(_compress, weight, mesh=mesh, spec=spec))


@partial(jax.jit, static_argnames="spec")
def _compress(weight: jax.Array, spec: Spec) -> Quantized:
    return jax.tree.map(lambda x, part: sharding.constrain(x, part.axes), quantize(weight, spec.inputs), _parts(spec))


def product(equation: str, x: jax.Array, weight: jax.Array | Quantized, dtype: Any = None) -> jax.Array:
    """Returns an einsum of activations with a weight whose output axes come last; see `products.product`."""
    if not isinstance(weight, Quantized):
        return products.product(equation, x, weight, dtype)
    # Tied to x: XLA would convert the values of all layers ahead of a decoding loop and hold them, wide, to its end.
    x, values = lax.optimization_barrier((x, weight.values))
    dtype = dtype or x.dtype
    wide = jnp.float32 if dtype == jnp.float16 else dtype  # sums of x with values up to 127 overflow float16
    return (products.product(equation, x, values.astype(x.dtype), wide) * weight.scale.astype(wide)).astype(dtype)


def lookup(table: jax.Array | Quantized, ids: jax.Array) -> jax.Array:
    """Returns vectors of a table by id, [..., d]."""
    if not isinstance(table, Quantized):
        return indexing.lookup(table, ids)
    # XLA reads one vector by a slice, for which a TPU would copy the whole int8 table; it gathers two in place.
    values = table.values[jnp.stack([ids, ids])][0] if ids.size == 1 else table.values[ids]
    return values.astype(table.dtype) * table.scale[ids][..., None]


def _parts(spec: Spec) -> Quantized:
    outputs = [axis for axis in range(len(spec.shape)) if axis not in spec.inputs]
    shape, axes = (tuple(values[axis] for axis in outputs) for values in (spec.shape, spec.axes))
    return Quantized(values=replace(spec, inputs=(), dtype=jnp.int8), scale=Spec(shape, axes, "ones"))
