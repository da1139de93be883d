"""Device meshes and the map from logical axes to mesh axes.

RULES maps logical axes of arrays ("batch", "heads", "vocab", ...) to mesh axes. If a mesh axis does not divide the size of
an array's axis, that axis is replicated, so any model runs on any mesh. Functions use JAX's ambient mesh (`jax.set_mesh`);
without a mesh, they return their arguments unchanged.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from treeflash_jax.core.checks import coerce, integer
from treeflash_jax.core.devices import Device, describe
from treeflash_jax.core.error_text import quoted

RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "heads": ("model",),
    "kv_heads": ("model",),
    "ffn": ("model",),
    "experts": ("model",),
    "expert_ffn": ("model",),  # unless the experts are sharded over it
    "vocab": ("model",),
    "embed": ("fsdp",),  # model width, for weights only
}

Axes = tuple[str | None, ...]


def make_mesh(
    data: int = 1, model: int = 1, devices: Sequence[jax.Device] | None = None, *, fsdp: int = 1, experts: int | None = None
) -> Mesh:
    """Makes a (data, model) mesh, or (data, fsdp, model) for training.

    Sequences are sharded over `data` and `fsdp`; heads, feed-forward and vocabulary over `model`; stored weights also over
    `fsdp`. Experts of a mixture are sharded over `model`, so that each is on one device. With `experts`, they are sharded
    over an axis of that name instead, and the width of every expert over `model`. For example, with `experts=1` every
    device along `model` has a slice of each expert, so passes over few tokens read less.

    Raises:
      ValueError: the product of the sizes exceeds the number of devices.
    """
    available = list(devices if devices is not None else jax.devices())
    sizes = {"data": data, "fsdp": fsdp, "model": model} | ({} if experts is None else {"experts": experts})
    sizes = {name: integer(size, name, least=1) for name, size in sizes.items()}
    if fsdp == 1:
        del sizes["fsdp"]
    count = math.prod(sizes.values())
    if count > len(available):
        shown = " x ".join(map(str, sizes.values()))
        raise ValueError(f"got a mesh of {shown}, expected a product of at most {len(available)} devices")
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=available[:count])


def check_mesh(mesh: Mesh | None) -> None:
    """Raises ValueError for a mesh without the axes of `make_mesh`."""
    coerce(Mesh | None, mesh, "mesh")
    if mesh is not None and not {"data", "model"} <= {*mesh.axis_names}:
        raise ValueError(f"got a mesh of axes {quoted(mesh.axis_names)}, expected 'data' and 'model' (make_mesh)")


def device(mesh: Mesh | None = None) -> Device:
    """Returns the Device of a mesh; None: of the default device."""
    return describe(jax.devices()[0] if mesh is None else mesh.devices.flat[0])


def parse_sizes(text: str) -> dict[str, int]:
    """Parses arguments of `make_mesh` like 4x2 (data x model) or 4x2x1 (with experts). Raises ValueError for others."""
    words, names = text.split("x"), ("data", "model", "experts")
    if len(words) not in (2, 3) or not all(word.isdigit() and int(word) for word in words):
        raise ValueError(f"got mesh {quoted(text)}, expected two numbers like 4x2, or three for a mixture of experts")
    return dict(zip(names, map(int, words), strict=False))


def partition(axes: Axes, shape: Sequence[int], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Returns the PartitionSpec of an array with these logical axes; indivisible axes are replicated.

    If several axes map to the same mesh axis, the first gets it. On a mesh with an axis "experts", experts are sharded over
    that axis only. Axes of an enclosing `jax.shard_map` are left out, because arrays are already local along them.
    """
    sizes = {name: size for name, size in mesh.shape.items() if name in free_axes(mesh)}
    taken: set[str] = set()

    def mesh_axis(axis: str | None, size: int) -> str | tuple[str, ...] | None:
        rule = (axis,) if axis == "experts" and axis in mesh.shape else RULES.get(axis, ())
        names = tuple(name for name in rule if name in sizes)
        if not names or size % math.prod(sizes[name] for name in names) or taken & {*names}:
            return None
        taken.update(names)
        return names if len(names) > 1 else names[0]

    return PartitionSpec(*(mesh_axis(axis, size) for axis, size in zip(axes, shape, strict=True)))


def sharding(axes: Axes, shape: Sequence[int], mesh: Mesh | AbstractMesh) -> NamedSharding:
    return NamedSharding(mesh, partition(axes, shape, mesh))


def ambient(mesh: Mesh | None) -> AbstractContextManager:
    """Returns a context with this ambient mesh; None keeps the current one."""
    return nullcontext() if mesh is None else jax.set_mesh(mesh)


def current() -> AbstractMesh | None:
    """Returns the ambient mesh, or None."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def manual_axes(mesh: Mesh | AbstractMesh | None) -> frozenset[str]:
    """Returns the mesh axes of an enclosing `jax.shard_map`."""
    return frozenset(getattr(mesh, "manual_axes", ()))


def free_axes(mesh: Mesh | AbstractMesh | None) -> frozenset[str]:
    """Returns the mesh axes that no enclosing `jax.shard_map` uses; empty without a mesh."""
    return frozenset(() if mesh is None else mesh.axis_names) - manual_axes(mesh)


def constrain(x: jax.Array, axes: Axes) -> jax.Array:
    """Constrains the sharding of `x` on the ambient mesh."""
    mesh = current()
    return x if mesh is None else jax.lax.with_sharding_constraint(x, partition(axes, x.shape, mesh))


def pad_batch_size(size: int, mesh: Mesh | None) -> int:
    """Rounds a batch size up to a multiple of the number of parts into which the mesh splits a batch (data x fsdp)."""
    return per_shard(size, mesh) * _data_ways(mesh)


def per_shard(size: int, mesh: Mesh | AbstractMesh | None) -> int:
    """Returns the number of sequences in each part of a batch that the mesh splits, padding included."""
    return -(-size // _data_ways(mesh))


def _data_ways(mesh: Mesh | AbstractMesh | None) -> int:
    sizes = {} if mesh is None else dict(mesh.shape)
    return math.prod(sizes.get(axis, 1) for axis in RULES["batch"])


def place(tree: Any, mesh: Mesh | None, *, over_batch: bool = True) -> Any:
    """Puts the arrays of a tree on the mesh.

    Args:
      tree: arrays that are complete on every process.
      mesh: mesh for the arrays; None leaves them on their devices.
      over_batch: whether the first axis, the batch, is sharded over the mesh; if not, arrays are replicated.
    """
    if mesh is None:
        return tree

    def put(x: jax.Array) -> jax.Array:
        if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):  # JAX cannot put keys on devices of other processes
            return jax.random.wrap_key_data(put(jax.random.key_data(x)))
        axes = ("batch" if over_batch else None,) + (None,) * (x.ndim - 1) if x.ndim else ()
        spec = partition(axes, x.shape, mesh)
        while spec and spec[-1] is None:  # programs' results have shardings in this form
            spec = PartitionSpec(*spec[:-1])
        return jax.device_put(x, NamedSharding(mesh, spec))

    return jax.tree.map(put, tree)


def pin(tree: Any, axes: Any) -> Any:
    """Constrains the sharding of every array of a tree; `axes` is a tree with the logical axes of each."""
    return tree if current() is None else jax.tree.map(constrain, tree, axes)


def to_host(tree: Any) -> Any:
    """Returns NumPy copies of the arrays of a tree, complete on every process."""

    def gather(x: Any) -> Any:
        is_local = getattr(x, "is_fully_addressable", True)
        return x if is_local else multihost_utils.process_allgather(x, tiled=True)

    return jax.device_get(jax.tree.map(gather, tree))


def over_batch(function: Callable[..., Any], *arrays: Any) -> Any:
    """Runs a function on each device's sequences. The batch must be the first axis of all its arguments and results.

    It serves small operations for which automatic partitioning would gather the batch (`top_k` of a frontier).
    """
    mesh = current()
    batch = jax.tree.leaves(arrays)[0].shape[0]
    spec = PartitionSpec(None) if mesh is None else partition(("batch",), (batch,), mesh)
    if spec == PartitionSpec(None):
        return function(*arrays)
    return per_device(function, mesh, spec, spec)(*arrays)


def over_mesh(function: Callable[..., Any], arrays: Sequence[Any], layouts: Sequence[tuple[Axes, Sequence[int]]]) -> Any:
    """Runs a function on each device's part of `arrays`, which may be pytrees. Its result is sharded like the first.

    For each of `arrays`, `layouts` has the logical axes and the sizes that the mesh axes must divide.
    """
    mesh = current()
    if mesh is None or not free_axes(mesh):
        return function(*arrays)
    specs = tuple(partition(axes, sizes, mesh) for axes, sizes in layouts)
    return per_device(function, mesh, specs, specs[0])(*arrays)


def per_device(run: Callable[..., Any], mesh: AbstractMesh | None, inputs: Any, outputs: Any) -> Callable[..., Any]:
    """Makes `run` act on each device's part of its arguments: `jax.shard_map` over the mesh's free axes.

    `inputs` and `outputs` are the PartitionSpecs of arguments and results.
    """
    free = free_axes(mesh)
    return jax.shard_map(run, mesh=mesh, in_specs=inputs, out_specs=outputs, axis_names=free, check_vma=False)
