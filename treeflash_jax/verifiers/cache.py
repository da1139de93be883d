"""Key/value caches: committed rows only, slot s holding absolute position s.

New rows live outside the cache until they are committed, so a verification pass reads the cache and never writes it.
Each layer owns its arrays: nothing is stacked, so no pass copies a slice. This file and attention.py alone look inside.

Shape suffixes: b batch, t new rows, p committed rows, k key/value heads, s slots, e head dim.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from treeflash_jax import mesh as meshes
from treeflash_jax.verifiers.config import ModelConfig

# Heads before slots: a head's rows are contiguous, which is what both attention products read.
AXES: meshes.Axes = ("batch", "kv_heads", None, None)


@struct.dataclass
class LayerKV:
    """Keys (after QK-norm and rotation) and values of one layer."""

    keys_bkse: jax.Array
    values_bkse: jax.Array


@struct.dataclass
class KVCache:
    """Committed keys and values of a stack of layers.

    Attributes:
      groups: per run of identical layers, its layers in order.
      length_b: committed rows of each sequence; slots beyond hold garbage.
    """

    groups: tuple[tuple[LayerKV, ...], ...]
    length_b: jax.Array

    @property
    def capacity(self) -> int:
        return self.groups[0][0].keys_bkse.shape[2]

    def cut(self, length_b: jax.Array) -> KVCache:
        """Returns a cache of only the first `length_b` committed positions of each sequence."""
        return self.replace(length_b=length_b)


NewRows = tuple[tuple[tuple[jax.Array, jax.Array], ...], ...]


def allocate(config: ModelConfig, batch: int, capacity: int, dtype: Any) -> KVCache:
    """An empty cache of `capacity` slots for `batch` sequences."""
    shape = (batch, config.num_kv_heads, capacity, config.head_dim)

    def zeros() -> jax.Array:
        return jnp.zeros(shape, dtype)

    groups = tuple(tuple(LayerKV(zeros(), zeros()) for _ in range(size)) for size in config.groups)
    return pin(KVCache(groups=groups, length_b=jnp.zeros(batch, jnp.int32)))


def append(cache: KVCache, rows: NewRows, count_b: jax.Array, path_bp: jax.Array | None = None) -> KVCache:
    """Commits the first `count_b` of the new rows, or of the rows that `path_bp` names, in that order.

    All rows are written at `length_b` in one fixed-width store; those past `count_b` are garbage that the next commit
    overwrites. The caller keeps `length_b + width <= capacity`.

    Args:
      rows: per group and layer, keys and values of the new rows [b, t, k, e].
      count_b: rows to keep per sequence; 0 leaves a sequence as it was. Inside a loop it has to follow from the pass that
        read the cache: stores wait for it, and one that could come before a read would make XLA copy the cache.
      path_bp: which of the t new rows, in order of position; all of them if None.
    """

    def store(slots_bkse: jax.Array, rows_btke: jax.Array) -> jax.Array:
        if path_bp is not None:
            rows_btke = jnp.take_along_axis(rows_btke, path_bp[:, :, None, None], axis=1)
        rows_bkpe = meshes.constrain(jnp.swapaxes(rows_btke, 1, 2).astype(slots_bkse.dtype), AXES)
        rows_bkpe = jnp.where((count_b > 0)[:, None, None, None], rows_bkpe, 0)  # see Args
        if slots_bkse.shape[0] == 1:  # a plain slice store; the batched form lowers to a scatter
            return lax.dynamic_update_slice_in_dim(slots_bkse, rows_bkpe, cache.length_b[0], axis=2)
        if slots_bkse.dtype != jnp.bfloat16:
            return _scattered(slots_bkse, rows_bkpe, cache.length_b)
        return lax.platform_dependent(slots_bkse, rows_bkpe, cache.length_b, cpu=_selected, default=_scattered)

    groups = tuple(
        tuple(
            LayerKV(store(layer.keys_bkse, keys), store(layer.values_bkse, values))
            for layer, (keys, values) in zip(group, new, strict=True)
        )
        for group, new in zip(cache.groups, rows, strict=True)
    )
    return pin(KVCache(groups=groups, length_b=cache.length_b + count_b.astype(jnp.int32)))


def _scattered(slots_bkse: jax.Array, rows_bkpe: jax.Array, length_b: jax.Array) -> jax.Array:
    write = jax.vmap(lambda slots_kse, rows_kpe, at: lax.dynamic_update_slice_in_dim(slots_kse, rows_kpe, at, axis=1))
    return write(slots_bkse, rows_bkpe, length_b)


def _selected(slots_bkse: jax.Array, rows_bkpe: jax.Array, length_b: jax.Array) -> jax.Array:
    """Every slot is the old one or a new row: XLA's CPU backend would scatter into a float32 copy of the whole cache."""
    width = rows_bkpe.shape[2]
    row_bs = jnp.arange(slots_bkse.shape[2]) - length_b[:, None]
    written_bs = (row_bs >= 0) & (row_bs < width)
    chosen_bkse = jnp.take_along_axis(rows_bkpe, jnp.clip(row_bs, 0, width - 1)[:, None, :, None], axis=2)
    return jnp.where(written_bs[:, None, :, None], chosen_bkse, slots_bkse)


def pin(cache: KVCache) -> KVCache:
    """Constrains a cache to its layout on the ambient mesh, so that loops carry it in that layout and no other."""
    return meshes.pin(cache, axes(cache))


def axes(cache: KVCache) -> KVCache:
    """The logical axes of every array of a cache, in its structure."""
    return KVCache(groups=jax.tree.map(lambda _: AXES, cache.groups), length_b=("batch",))


def grow(cache: KVCache, capacity: int) -> KVCache:
    """The same rows in a cache of `capacity` slots."""

    def pad(slots_bkse: jax.Array) -> jax.Array:
        extra = capacity - slots_bkse.shape[2]
        return jnp.pad(slots_bkse, ((0, 0), (0, 0), (0, extra), (0, 0)))

    return pin(cache.replace(groups=jax.tree.map(pad, cache.groups)))
