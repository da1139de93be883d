"""Bytes of weights and caches per device, summed over trees of abstract arrays, and the check that they fit.

Temporaries of programs are not counted; `treeflash bench memory` reads them from the compiler.
"""

import functools
import math
import re
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from treeflash_jax.core import parameters, sharding
from treeflash_jax.core.checks import NoRoom
from treeflash_jax.core.dtypes import bits
from treeflash_jax.drafters import Drafter
from treeflash_jax.models import caches, decoder
from treeflash_jax.models.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes on each device of a mesh."""

    verifier: int
    drafter: int = 0
    verifier_cache: int = 0
    drafter_cache: int = 0

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


@functools.lru_cache(256)  # called on every request and takes over 1 ms
def footprint(
    verifier: ModelConfig,
    drafter: Drafter | None = None,
    *,
    dtype: DTypeLike,
    mesh: Mesh | None = None,
    batch: int = 0,
    capacity: int = 0,
    drafts: bool = True,
    can_cut: bool = False,
    quantize: str | None = None,
    weight_bytes: tuple[int, int] | None = None,
) -> Footprint:
    """Counts the bytes of a pair and of the caches of a batch on each device.

    Args:
      drafter: the drafter; None for one-token decoding.
      mesh: concrete or abstract mesh; None for one device.
      batch: number of sequences decoded together on all devices.
      drafts: whether the batch has caches of the drafter.
      can_cut: whether caches also hold the states from which a session can continue.
      quantize: scheme of the verifier's matrices, to count their bytes; None: no quantisation.
      weight_bytes: bytes of the weights of verifier and drafter; None: counted.
    """
    cache = jax.eval_shape(lambda: caches.allocate(verifier, batch, capacity, dtype, can_cut=can_cut))
    drafter_cache = 0
    if drafter is not None and drafts:
        state = jax.eval_shape(lambda: drafter.init(batch, capacity, dtype))
        drafter_cache = _state_bytes(state, mesh)
    if weight_bytes is None:
        specs = decoder.specs(verifier, quantize, mesh=mesh), {} if drafter is None else drafter.specs()
        weight_bytes = tuple(count_bytes(tree, dtype, mesh) for tree in specs)
    return Footprint(
        verifier=weight_bytes[0],
        drafter=weight_bytes[1],
        verifier_cache=_state_bytes(cache, mesh),
        drafter_cache=drafter_cache,
    )


def count_bytes(specs: Any, dtype: DTypeLike, mesh: Mesh | None = None) -> int:
    """Returns the bytes that weights of these specs take on each device."""
    return device_bytes(parameters.abstract(specs, dtype, mesh))


def device_bytes(tree: Any) -> int:
    """Returns the bytes that arrays, concrete or abstract, take on each device. Arrays without a sharding count fully."""

    def size(x: Any) -> int:
        shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
        return math.prod(shape) * bits(x.dtype) // 8

    return sum(map(size, jax.tree.leaves(tree)))


def _state_bytes(state: Any, mesh: Mesh | None) -> int:
    """Returns the bytes of a state on each device. Vectors are left out: they do not grow with the capacity."""

    def placed(x: jax.ShapeDtypeStruct, axes: sharding.Axes) -> jax.ShapeDtypeStruct | None:
        layout = None if mesh is None else sharding.sharding(axes, x.shape, mesh)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout) if x.ndim > 1 else None

    return device_bytes(jax.tree.map(placed, state, state.axes()))


@functools.cache
def host_memory() -> int | None:
    """Returns the bytes of host memory available to this process, allowed swap included; None if unknown."""

    def number(path: str, name: str) -> int | None:
        """Returns the bytes that an entry of /proc states in KiB or, if `name` is empty, a control group's file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError:
            return None
        match = re.search(rf"^{name}:\s*(\d+) kB" if name else r"^(\d+)$", text, flags=re.MULTILINE)
        return int(match[1]) * (1024 if name else 1) if match else None

    memory = number("/proc/meminfo", "MemTotal")
    swap = number("/proc/meminfo", "SwapTotal") or 0
    limit = number("/sys/fs/cgroup/memory.max", "")
    group_swap = number("/sys/fs/cgroup/memory.swap.max", "")
    old_limit = number("/sys/fs/cgroup/memory/memory.limit_in_bytes", "")
    old_sum = number("/sys/fs/cgroup/memory/memory.memsw.limit_in_bytes", "")
    sums = (memory, swap), (limit, swap if group_swap is None else group_swap), (old_limit, swap), (old_sum, 0)
    return min((size + more for size, more in sums if size), default=None)


def usable_memory(mesh: Mesh | None = None) -> int | None:
    """Returns the bytes that JAX may use on a device of the mesh or the default device; None if not known.

    On CPUs, each device has an equal share of the host's memory.
    """
    devices = jax.local_devices()[:1] if mesh is None else mesh.local_devices
    if sharding.device(mesh).is_cpu:
        total = host_memory()
        return total and total // max(len(devices), 1)
    limits = []
    for device in devices:
        with suppress(jax.errors.JaxRuntimeError, NotImplementedError):  # abstract devices have no statistics
            limits.append((device.memory_stats() or {}).get("bytes_limit"))
    return min(filter(None, limits), default=sharding.device(mesh).memory)


def refuse_if_too_large(needs: Footprint, limit: int | None, mesh: Mesh | None = None) -> None:
    """Raises NoRoom if weights and caches exceed `limit` bytes; None disables the check."""
    if limit is None or needs.total <= limit:
        return
    cache_bytes = needs.verifier_cache + needs.drafter_cache
    parts = {"verifier": needs.verifier, "drafter": needs.drafter, "caches": cache_bytes}
    shown = "1 device" if mesh is None else "mesh " + " x ".join(str(size) for size in dict(mesh.shape).values())
    raise NoRoom(
        f"got {' + '.join(f'{in_units(size)} {name}' for name, size in parts.items() if size)} = {in_units(needs.total)} "
        f"on a device of {in_units(limit)} ({shown}), expected at most its memory; "
        "use a larger mesh, a smaller dtype, or a smaller batch or context"
    )


def in_units(size: int) -> str:
    """Formats bytes in GiB, MiB or KiB."""
    unit = next((unit for unit in (30, 20) if size >= 2**unit // 10), 10)
    return f"{size / 2**unit:.2f} {'KMG'[unit // 10 - 1]}iB"
