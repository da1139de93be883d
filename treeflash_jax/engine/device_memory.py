"""Bytes of weights and caches per device, computed from sizes, and the check that they fit.

Temporaries of programs are not counted; `treeflash bench memory` reads them from the compiler.
"""

import functools
from dataclasses import asdict, dataclass
from typing import Any

import jax

from treeflash_jax.core import devices
from treeflash_jax.drafters import DrafterConfig
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.models.costs import Counter
from treeflash_jax.models.verifier import specs


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
    drafter: DrafterConfig | None = None,
    *,
    dtype: Any,
    mesh=None,
    batch: int = 0,
    capacity: int = 0,
    drafts: bool = True,
    quantize: str | None = None,
) -> Footprint:
    """Counts the bytes of a pair and of the caches of a batch on each device.

    Args:
      drafter: sizes of the drafter; None for plain decoding.
      mesh: concrete or abstract mesh; None for one device.
      batch: number of sequences decoded together on all devices.
      drafts: whether the batch has caches of the drafter.
    """
    count = Counter(dtype=dtype, batch=batch, mesh=mesh)
    drafter_bytes = drafter_cache = 0
    if drafter is not None:
        drafter_bytes = count.weights(drafter.specs()).bytes
        state = jax.eval_shape(lambda: drafter.init(batch, capacity, dtype))
        drafter_cache = sum(jax.tree.leaves(jax.tree.map(count.array_bytes, state, state.axes()))) if drafts else 0
    return Footprint(
        verifier=count.weights(specs(verifier, quantize)).bytes,
        drafter=drafter_bytes,
        verifier_cache=count.cached(verifier, capacity).bytes,
        drafter_cache=drafter_cache,
    )


def memory_limit(mesh=None) -> int | None:
    """Returns the bytes that JAX may use on a device of the mesh or the default device; None if not known, as on a CPU."""
    limits = [devices.memory(device) for device in (jax.local_devices()[:1] if mesh is None else mesh.local_devices)]
    return min((limit for limit in limits if limit), default=None)


def usable_memory(mesh=None) -> int | None:
    """Returns the bytes of memory of a device: `memory_limit`, or on CPUs its share of the host's memory."""
    if not devices.describe_mesh(mesh).is_cpu:
        return memory_limit(mesh)
    total, count = devices.host_memory(), 1 if mesh is None else len(mesh.local_devices)
    return total and total // max(count, 1)


def check_memory(needs: Footprint, limit: int | None, mesh=None) -> None:
    """Raises ValueError if weights and caches exceed `limit` bytes; None disables the check."""
    if limit is None or needs.total <= limit:
        return
    caches = needs.verifier_cache + needs.drafter_cache
    parts = {"verifier": needs.verifier, "drafter": needs.drafter, "caches": caches}
    shown = "1 device" if mesh is None else "mesh " + " x ".join(str(size) for size in dict(mesh.shape).values())
    raise ValueError(
        f"got {' + '.join(f'{in_units(size)} {name}' for name, size in parts.items() if size)} = {in_units(needs.total)} "
        f"on a device of {in_units(limit)} ({shown}), expected at most its memory; "
        "use a larger mesh, a smaller dtype, or a smaller batch or context"
    )


def in_units(size: int) -> str:
    """Formats bytes in GiB, MiB or KiB."""
    unit = next((unit for unit in (30, 20) if size >= 2**unit // 10), 10)
    return f"{size / 2**unit:.2f} {'KMG'[unit // 10 - 1]}iB"
