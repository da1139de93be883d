"""One `Spec` per weight: shape, logical axes, initialiser. Abstract trees, shardings and fresh weights derive from it.

An `Entry` says where a weight lies in a file. Specs, entries and weights are trees of one shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

from treeflash_jax import mesh as meshes


@dataclass(frozen=True)
class Spec:
    """A weight's shape, the logical axis of each dimension, and how a fresh one is drawn.

    Attributes:
      inputs: axes that products with the weight sum over; () for biases, norms and whatever else no product reads. Weights
        with inputs decay in training and can be quantised.
      outputs: the other axes of a linear map that Muon trains as a matrix of inputs by outputs; () leaves it to AdamW.
      can_quantize: false keeps a weight with inputs in the model's dtype.
      dtype: where it is not the model's.
    """

    shape: tuple[int, ...]
    axes: meshes.Axes
    init: Literal["normal", "ones", "zeros"] = "normal"
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    can_quantize: bool = True
    dtype: Any = None

    def dtype_in(self, dtype: Any) -> Any:
        """Its dtype in a model of `dtype`."""
        return jnp.dtype(dtype if self.dtype is None else self.dtype)


@dataclass(frozen=True)
class Entry:
    """Where a weight lies: tensor `name`, whose axes are the weight's in `order`, the first `rows` of them flattened.

    Weights of many experts lie in a tensor for each, or in one of three axes: their first axis is then none of `order`,
    `rows` and the tensor's rows and columns.

    Attributes:
      name: in the file, without a dialect's prefix; with "{}" in it, the name of a tensor for each index of the first axis.
      order: the weight's axes in disk order.
      rows: how many of these make the tensor's rows; all of them make a vector.
      part: (index, count) where the weight is one of `count` equal blocks.
      part_axis: whether these are blocks of rows (0) or of columns (1).
      is_stacked: whether the tensor has the weight's first axis as its own first axis.
    """

    name: str
    order: tuple[int, ...] = (0,)
    rows: int = 1
    part: tuple[int, int] = (0, 1)
    part_axis: int = 1
    is_stacked: bool = False

    @property
    def is_apart(self) -> bool:
        """Whether the weight lies in a tensor for each index of its first axis."""
        return "{}" in self.name

    def names(self, spec: Spec) -> list[str]:
        """All tensors that the weight lies in."""
        return [self.name.format(i) for i in range(spec.shape[0])] if self.is_apart else [self.name]

    def one(self, index: int) -> Entry:
        """Of one index of the first axis, where that is none of `order`."""
        return replace(self, name=self.name.format(index), is_stacked=False)

    def view(self, spec: Spec) -> tuple[int, ...]:
        return tuple(spec.shape[axis] for axis in self.order)

    def disk_shape(self, spec: Spec) -> tuple[int, ...]:
        """Of each tensor."""
        if self.is_apart or self.is_stacked:
            inner = replace(self, name="", is_stacked=False).disk_shape(inside(spec))
            return (spec.shape[0], *inner) if self.is_stacked else inner
        view, parts = self.view(spec), self.part[1]
        rows = math.prod(view[: self.rows]) * (parts if self.part_axis == 0 else 1)
        columns = math.prod(view[self.rows :]) * (parts if self.part_axis == 1 else 1)
        return (rows, columns) if self.rows < len(view) else (math.prod(view),)


def inside(spec: Spec) -> Spec:
    """The spec of one index of a weight's first axis."""
    inputs, outputs = (tuple(axis - 1 for axis in axes) for axes in (spec.inputs, spec.outputs))
    return replace(spec, shape=spec.shape[1:], axes=spec.axes[1:], inputs=inputs, outputs=outputs)


def count(tree: Any) -> int:
    """How many numbers a tree of weights holds."""
    return sum(x.size for x in jax.tree.leaves(tree))


def is_spec(x: Any) -> bool:
    return isinstance(x, Spec)


def shardings(specs: Any, mesh) -> Any:
    return jax.tree.map(lambda spec: meshes.sharding(spec.axes, spec.shape, mesh), specs, is_leaf=is_spec)


def abstract(specs: Any, dtype: Any, mesh=None) -> Any:
    """`jax.ShapeDtypeStruct` of every weight, placed on `mesh` where one is given."""

    def leaf(spec: Spec) -> jax.ShapeDtypeStruct:
        place = None if mesh is None else meshes.sharding(spec.axes, spec.shape, mesh)
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype_in(dtype), sharding=place)

    return jax.tree.map(leaf, specs, is_leaf=is_spec)


def initialize(specs: Any, key: jax.Array, dtype: Any = jnp.float32, scale: float = 0.02) -> Any:
    """Fresh weights: normal of standard deviation `scale`, ones, or zeros. A weight's key depends on its place only."""
    leaves, treedef = jax.tree.flatten(specs, is_leaf=is_spec)

    def leaf(index: int, spec: Spec) -> jax.Array:
        if spec.init == "normal":
            return (scale * jax.random.normal(jax.random.fold_in(key, index), spec.shape)).astype(dtype)
        return jnp.full(spec.shape, spec.init == "ones", spec.dtype_in(dtype))

    return jax.tree.unflatten(treedef, [leaf(i, spec) for i, spec in enumerate(leaves)])
