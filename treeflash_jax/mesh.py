"""Device meshes and the map from logical axes to mesh axes.

Arrays name their axes logically ("batch", "heads", "vocab", ...); RULES says which mesh axis carries each. An axis whose
size the mesh axis does not divide is replicated, so any model runs on any mesh. The mesh in force is JAX's ambient one
(`jax.set_mesh`); without one, everything here is the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

RULES: dict[str, str | None] = {
    "batch": "data",
    "heads": "model",
    "kv_heads": "model",
    "ffn": "model",
    "vocab": "model",
}

Axes = tuple[str | None, ...]


def make_mesh(data: int = 1, model: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A (data, model) mesh: batch rows over `data`; heads, feed-forward and vocabulary over `model`.

    Raises:
      ValueError: the product is not the number of devices used.
    """
    available = list(devices if devices is not None else jax.devices())
    if data < 1 or model < 1 or data * model > len(available):
        raise ValueError(f"got a mesh of {data} x {model}, expected a product of at most {len(available)} devices")
    kinds = (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh((data, model), ("data", "model"), axis_types=kinds, devices=available[: data * model])


def partition(axes: Axes, shape: Sequence[int], mesh) -> PartitionSpec:
    """The PartitionSpec of an array with these logical axes; indivisible axes are replicated."""
    sizes = dict(mesh.shape)

    def mesh_axis(axis: str | None, size: int) -> str | None:
        name = RULES.get(axis) if axis is not None else None
        return name if name in sizes and size % sizes[name] == 0 else None

    return PartitionSpec(*(mesh_axis(axis, size) for axis, size in zip(axes, shape, strict=True)))


def sharding(axes: Axes, shape: Sequence[int], mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, partition(axes, shape, mesh))


def ambient(mesh: Mesh | None):
    """A context in which `mesh` is the ambient one; None changes nothing."""
    return nullcontext() if mesh is None else jax.set_mesh(mesh)


def current():
    """The ambient mesh, or None."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def constrain(x: jax.Array, axes: Axes) -> jax.Array:
    """Pins the layout of `x` on the ambient mesh."""
    mesh = current()
    return x if mesh is None else jax.lax.with_sharding_constraint(x, partition(axes, x.shape, mesh))


def by_rows(function: Callable[..., Any], *arrays: Any) -> Any:
    """`function` of pytrees whose leaves all start with the batch axis, run on each device's own rows.

    For small per-row work that automatic partitioning would gather over the batch (`top_k` of a frontier).
    """
    mesh = current()
    batch = jax.tree.leaves(arrays)[0].shape[0]
    if mesh is None or partition(("batch",), (batch,), mesh) == PartitionSpec(None):
        return function(*arrays)
    rows = PartitionSpec(RULES["batch"])
    return jax.shard_map(function, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)(*arrays)
