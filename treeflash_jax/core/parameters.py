"""Specs of weights: shape, logical axes and initialiser. Abstract trees, shardings and fresh weights derive from them.

An `Entry` is the location of a weight in a file. Trees of specs, entries and weights have the same structure.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from treeflash_jax.core import sharding

Params = dict[str, Any]  # weights by name: arrays, `Quantized` ones, and dictionaries or lists of them


@dataclass(frozen=True)
class Spec:
    """Shape of a weight, the logical axis of each dimension, and its initialiser.

    Attributes:
      axes: logical axes, for sharding.
      inputs: axes that products with the weight sum over; () for biases, norms and other weights outside products. Weights
        with inputs decay in training and can be quantised.
      outputs: other axes of a linear map that Muon trains as an (inputs, outputs) matrix; () leaves the weight to AdamW.
      can_quantize: whether a weight with inputs may be quantised; if not, it keeps the model's dtype.
      dtype: dtype of the weight; None: the model's dtype.
    """

    shape: tuple[int, ...]
    axes: sharding.Axes
    init: Literal["normal", "ones", "zeros", "range"] = "normal"
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    can_quantize: bool = True
    dtype: DTypeLike | None = None

    def dtype_in(self, dtype: DTypeLike) -> jnp.dtype:
        """Returns the weight's dtype in a model of `dtype`."""
        return jnp.dtype(dtype if self.dtype is None else self.dtype)


@dataclass(frozen=True)
class Entry:
    """Location of a weight: the tensor `name`, which has the weight's axes in `order`, flattened to a matrix.

    The weights of experts are stored either in one tensor per expert or in one tensor with three axes. In both cases,
    `order` and `row_axes` leave out the first axis.

    Attributes:
      name: name of the tensor, without a dialect's prefix. If it contains "{}", each index of the first axis has a tensor.
      order: the weight's axes in disk order.
      row_axes: number of these axes that form the matrix's first axis; if it is all of them, the tensor is a vector.
      part: (index, count) if the weight is one of `count` equal blocks of the tensor.
      part_axis: matrix axis of these blocks.
      is_stacked: whether the tensor has the weight's first axis as its first axis.
      has_middle: whether the tensor has an axis of size 1 between the matrix's two axes, as depthwise convolutions do.
    """

    name: str
    order: tuple[int, ...] = (0,)
    row_axes: int = 1
    part: tuple[int, int] = (0, 1)
    part_axis: int = 1
    is_stacked: bool = False
    has_middle: bool = False

    @property
    def is_apart(self) -> bool:
        """True if there is a tensor for each index of the weight's first axis."""
        return "{}" in self.name

    def names(self, spec: Spec) -> list[str]:
        return [self.name.format(i) for i in range(spec.shape[0])] if self.is_apart else [self.name]

    def at(self, index: int) -> Self:
        """Returns the entry of one expert."""
        return replace(self, name=self.name.format(index), is_stacked=False)

    def view(self, spec: Spec) -> tuple[int, ...]:
        return tuple(spec.shape[axis] for axis in self.order)

    def disk_shape(self, spec: Spec) -> tuple[int, ...]:
        """Returns the shape of each tensor."""
        if self.is_apart or self.is_stacked:
            inner = replace(self, name="", is_stacked=False).disk_shape(inside(spec))
            return (spec.shape[0], *inner) if self.is_stacked else inner
        view, parts = self.view(spec), self.part[1]
        height = math.prod(view[: self.row_axes]) * (parts if self.part_axis == 0 else 1)
        width = math.prod(view[self.row_axes :]) * (parts if self.part_axis == 1 else 1)
        if self.has_middle:
            return height, 1, width
        return (height, width) if self.row_axes < len(view) else (math.prod(view),)


def inside(spec: Spec) -> Spec:
    """Returns the spec without the weight's first axis."""
    inputs = tuple(axis - 1 for axis in spec.inputs)
    outputs = tuple(axis - 1 for axis in spec.outputs)
    return replace(spec, shape=spec.shape[1:], axes=spec.axes[1:], inputs=inputs, outputs=outputs)


def count(tree: Any) -> int:
    return sum(x.size for x in jax.tree.leaves(tree))


def is_spec(x: Any) -> bool:
    return isinstance(x, Spec)


def abstract(specs: Any, dtype: DTypeLike, mesh: Mesh | None = None) -> Any:
    """Returns the `jax.ShapeDtypeStruct` of every weight, sharded over `mesh` if it is given."""

    def leaf(spec: Spec) -> jax.ShapeDtypeStruct:
        layout = None if mesh is None else sharding.sharding(spec.axes, spec.shape, mesh)
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype_in(dtype), sharding=layout)

    return jax.tree.map(leaf, specs, is_leaf=is_spec)


def initialize(specs: Any, key: jax.Array, dtype: DTypeLike = jnp.float32, scale: float = 0.02) -> Any:
    """Draws weights from the initialisers of their specs; leaf i uses the key fold_in(key, i).

    Initialisers are: normal with standard deviation `scale`, ones, zeros, or the numbers 0, 1, 2, ...
    """
    leaves, treedef = jax.tree.flatten(specs, is_leaf=is_spec)

    def leaf(index: int, spec: Spec) -> jax.Array:
        if spec.init == "normal":
            return (scale * jax.random.normal(jax.random.fold_in(key, index), spec.shape)).astype(dtype)
        if spec.init == "range":
            return jnp.arange(math.prod(spec.shape), dtype=spec.dtype_in(dtype)).reshape(spec.shape)
        return jnp.full(spec.shape, spec.init == "ones", spec.dtype_in(dtype))

    return jax.tree.unflatten(treedef, [leaf(i, spec) for i, spec in enumerate(leaves)])
