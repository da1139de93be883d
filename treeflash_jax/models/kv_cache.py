"""Key/value caches of committed positions: slot s holds absolute position s.

New positions live outside the cache until they are committed, so a verify pass reads the cache and never writes it. Each
layer has arrays of its own: nothing is stacked, so no pass copies a slice. Only this module and attention look inside.

Shape suffixes: b batch, t new positions, p committed positions, k key/value heads, s slots, e head dim.
"""

from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct

from treeflash_jax.core import sharding
from treeflash_jax.models.backend import indexing
from treeflash_jax.models.config import ModelConfig

# Heads before slots: a head's positions are contiguous, which is what both attention products read.
AXES: sharding.Axes = ("batch", "kv_heads", None, None)


@struct.dataclass
class LayerKV:
    """Keys (after QK-norm and rotation) and values of one layer."""

    keys_bkse: jax.Array
    values_bkse: jax.Array


@struct.dataclass
class KVCache:
    """Committed keys and values of a stack of layers, `length_b` positions of each sequence; slots beyond hold garbage."""

    layers: tuple[LayerKV, ...]
    length_b: jax.Array

    def axes(self) -> Self:
        """Returns the logical axes of every array, in the structure of the cache."""
        return KVCache(layers=jax.tree.map(lambda _: AXES, self.layers), length_b=("batch",))

    def grow(self, capacity: int) -> Self:
        """Copies the cache into one of `capacity` slots."""

        def pad(slots_bkse: jax.Array) -> jax.Array:
            return jnp.pad(slots_bkse, ((0, 0), (0, 0), (0, capacity - slots_bkse.shape[2]), (0, 0)))

        return pin(self.replace(layers=jax.tree.map(pad, self.layers)))

    def cut(self, length_b: jax.Array) -> Self:
        """Returns a cache of only the first `length_b` committed positions of each sequence."""
        return self.replace(length_b=length_b)


NewKV = tuple[tuple[jax.Array, jax.Array], ...]  # keys and values [b, t, k, e] of each layer


def allocate(config: ModelConfig, batch: int, capacity: int, dtype: Any) -> KVCache:
    """Returns an empty cache of `capacity` slots for `batch` sequences."""
    shape = (batch, config.num_kv_heads, capacity, config.head_dim)
    layers = tuple(LayerKV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_layers))
    return pin(KVCache(layers=layers, length_b=jnp.zeros(batch, jnp.int32)))


def append(cache: KVCache, new: NewKV, count_b: jax.Array, path_bp: jax.Array | None = None) -> KVCache:
    """Commits the first `count_b` of the new positions, or of those that `path_bp` names, in that order.

    All positions are written at `length_b` in one fixed-width store; those past `count_b` are garbage that the next commit
    overwrites. The caller keeps `length_b + width <= capacity`.

    Args:
      count_b: number of positions to keep per sequence. Inside a loop it must depend on the pass that reads the cache
        (`count_after`): stores wait for it, and a store that could come before a read makes XLA copy the cache.
      path_bp: indices of new positions in order of position; None: all of them.
    """

    @jax.jit  # traced once for all layers; XLA inlines the calls
    def store(slots_bkse: jax.Array, new_btke: jax.Array) -> jax.Array:
        if path_bp is not None:
            new_btke = jnp.take_along_axis(new_btke, path_bp[:, :, None, None], axis=1)
        new_bkpe = sharding.constrain(jnp.swapaxes(new_btke, 1, 2).astype(slots_bkse.dtype), AXES)
        new_bkpe = jnp.where((count_b > 0)[:, None, None, None], new_bkpe, 0)  # see Args
        return indexing.store(slots_bkse, new_bkpe, cache.length_b)

    layers = tuple(
        LayerKV(store(layer.keys_bkse, keys_btke), store(layer.values_bkse, values_btke))
        for layer, (keys_btke, values_btke) in zip(cache.layers, new, strict=True)
    )
    return pin(KVCache(layers=layers, length_b=cache.length_b + count_b.astype(jnp.int32)))


def count_after(count_b: jax.Array, computed_b: jax.Array) -> jax.Array:
    """Returns `count_b`, made to depend on `computed_b`, so that stores of `append` follow the pass that reads the cache.

    XLA removes `lax.optimization_barrier` before it inserts copies (jax 0.10, CPU): with one, every store copies a cache.

    Args:
      computed_b: numbers that the pass computes; the result is `count_b` whatever they are.
    """
    return jnp.maximum(count_b, count_b - (computed_b < 0))


def pin(cache: KVCache) -> KVCache:
    """Constrains a cache to its layout on the ambient mesh, so that loops carry it in that layout and no other."""
    return sharding.pin(cache, cache.axes())
