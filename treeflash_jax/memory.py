"""Bytes of weights and caches on each device, from sizes alone, and the refusal of what no device can hold.

What a program needs besides is the compiler's to say: `treeflash bench memory`.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass
from typing import Any

import jax

from treeflash_jax import devices, drafters
from treeflash_jax.costs import Counter
from treeflash_jax.drafters import DrafterSizes
from treeflash_jax.verifiers import forward as verifiers
from treeflash_jax.verifiers.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes on one device of a mesh; all its devices hold as much."""

    verifier: int
    drafter: int = 0
    verifier_cache: int = 0
    drafter_cache: int = 0

    @property
    def caches(self) -> int:
        return self.verifier_cache + self.drafter_cache

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


@functools.lru_cache(256)  # a call asks, and counting takes it more than a millisecond
def footprint(
    verifier: ModelConfig,
    drafter: DrafterSizes | None = None,
    *,
    dtype: Any,
    mesh=None,
    batch: int = 0,
    capacity: int = 0,
    drafts: bool = True,
    quantize: str | None = None,
) -> Footprint:
    """What a pair and the caches of a request hold on each device.

    Args:
      drafter: sizes of the drafter; None for plain decoding.
      mesh: that they lie on, an abstract one will do; None: one device.
      batch: sequences decoded together, of all devices.
      capacity: positions that a sequence's caches hold.
      drafts: whether the request has caches of the drafter.

    Raises:
      ValueError: an unknown scheme.
    """
    count = Counter(dtype=dtype, batch=batch, mesh=mesh)
    held, remembered = 0, 0
    if drafter is not None:
        own = drafters.of(drafter)
        held = count.weights(own.specs(drafter)).bytes
        state = jax.eval_shape(lambda: own.init(drafter, batch, capacity, dtype))
        remembered = sum(jax.tree.leaves(jax.tree.map(count.slots, state, state.axes()))) if drafts else 0
    return Footprint(
        verifier=count.weights(verifiers.specs(verifier, quantize)).bytes,
        drafter=held,
        verifier_cache=count.cached(verifier, capacity).bytes,
        drafter_cache=remembered,
    )


def memory_limit(mesh=None) -> int | None:
    """Returns the bytes that JAX may use on a device of the mesh or the default device; None if not known, as on a CPU."""
    limits = [devices.memory(device) for device in (jax.local_devices()[:1] if mesh is None else mesh.local_devices)]
    return min((limit for limit in limits if limit), default=None)


def room(mesh=None) -> int | None:
    """Bytes that a device of the mesh can hold at most: `memory_limit`, or on CPUs its share of the host's memory."""
    limit = memory_limit(mesh)
    held = jax.local_devices()[:1] if mesh is None else list(mesh.local_devices)
    if limit is None and held and devices.of(held[0]).is_cpu:
        total = devices.host_memory()
        return total and total // len(held)
    return limit


def check_memory(needs: Footprint, limit: int | None, mesh=None) -> None:
    """Refuses what a device of `limit` bytes cannot hold; None refuses nothing.

    Raises:
      ValueError: with the sum.
    """
    if limit is None or needs.total <= limit:
        return
    parts = {"verifier": needs.verifier, "drafter": needs.drafter, "caches": needs.caches}
    shown = "1 device" if mesh is None else "mesh " + " x ".join(str(size) for size in dict(mesh.shape).values())
    raise ValueError(
        f"got {' + '.join(f'{in_units(size)} {name}' for name, size in parts.items() if size)} = {in_units(needs.total)} "
        f"on a device of {in_units(limit)} ({shown}), expected at most what it has; "
        "use a larger mesh, a smaller dtype, or a smaller batch or context"
    )


def in_units(size: int) -> str:
    """Bytes as people read them: in GiB, MiB or KiB."""
    unit = next((unit for unit in (30, 20) if size >= 2**unit // 10), 10)
    return f"{size / 2**unit:.2f} {'KMG'[unit // 10 - 1]}iB"
