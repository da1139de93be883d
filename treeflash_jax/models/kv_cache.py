"""Key/value caches of committed positions: slot s holds absolute position s.

New positions live outside the cache until they are committed, so a verify pass reads the cache and never writes it. Keys
(and values) are in one array for each layer, or in one for all (stacked). Kernels read one layer of a stack where it lies
(`attention.READS_STACKS`), and a commit to a stack is one store for keys and one for values. Other implementations copy
the layer out of a stack first.

Shape suffixes: b batch, n layers of an array, t new positions, p committed positions, k key/value heads, s slots, x slots
that are read, e head dim.
"""

from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from treeflash_jax.core import sharding
from treeflash_jax.models.backend import indexing
from treeflash_jax.models.config import ModelConfig

# Heads before slots: a head's positions are contiguous, which is what both attention products read.
AXES: sharding.Axes = ("batch", None, "kv_heads", None, None)


@struct.dataclass
class LayerKV:
    """Keys (after QK-norm and rotation) and values of one layer, in arrays that hold n of them.

    Attributes:
      keys_bnkse, values_bnkse: keys and values of the n layers.
      layer: index of this layer among them, an int32 scalar.
    """

    keys_bnkse: jax.Array
    values_bnkse: jax.Array
    layer: jax.Array

    @property
    def num_slots(self) -> int:
        return self.keys_bnkse.shape[3]

    def read(self, start: Any = 0, size: int | None = None) -> tuple[jax.Array, jax.Array]:
        """Returns keys and values [b, k, x, e] of `size` slots from `start` on; None: all slots."""
        batch, layers, heads, slots, head_dim = self.keys_bnkse.shape
        layer = self.layer if layers > 1 else 0  # a constant, so that XLA reads the array of one layer where it lies
        first = [jnp.int32(index) for index in (0, layer, 0, start, 0)]
        sizes = batch, 1, heads, size or slots, head_dim
        keys, values = (lax.dynamic_slice(x_bnkse, first, sizes) for x_bnkse in (self.keys_bnkse, self.values_bnkse))
        return keys[:, 0], values[:, 0]


@struct.dataclass
class KVCache:
    """Committed keys and values of a model, `length_b` positions of each sequence; slots beyond hold garbage.

    Attributes:
      keys, values: arrays [b, n, k, s, e] in order of layers: one for each layer, or one for all.
      length_b: number of committed positions.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    length_b: jax.Array

    @property
    def layers(self) -> tuple[LayerKV, ...]:
        pairs = zip(self.keys, self.values, strict=True)
        return tuple(LayerKV(*pair, np.int32(layer)) for pair in pairs for layer in range(pair[0].shape[1]))

    def axes(self) -> Self:
        """Returns the logical axes of every array, in the structure of the cache."""
        return KVCache(*jax.tree.map(lambda _: AXES, (self.keys, self.values)), length_b=("batch",))

    def grow(self, capacity: int) -> Self:
        """Copies the cache into one of `capacity` slots."""

        def pad(x_bnkse: jax.Array) -> jax.Array:
            return jnp.pad(x_bnkse, ((0, 0), (0, 0), (0, 0), (0, capacity - x_bnkse.shape[3]), (0, 0)))

        return pin(KVCache(*jax.tree.map(pad, (self.keys, self.values)), self.length_b))

    def cut(self, length_b: jax.Array) -> Self:
        """Returns a cache of only the first `length_b` committed positions of each sequence."""
        return self.replace(length_b=length_b)


NewKV = tuple[tuple[jax.Array, jax.Array], ...]  # keys and values [b, t, k, e] of each layer


def allocate(config: ModelConfig, batch: int, capacity: int, dtype: Any, *, stacked: bool = False) -> KVCache:
    """Returns an empty cache of `capacity` slots for `batch` sequences; with `stacked`, all layers are in one array."""
    num_arrays, layers = (1, config.num_layers) if stacked else (config.num_layers, 1)
    shape = (batch, layers, config.num_kv_heads, capacity, config.head_dim)
    keys, values = (tuple(jnp.zeros(shape, dtype) for _ in range(num_arrays)) for _ in range(2))
    return pin(KVCache(keys, values, length_b=jnp.zeros(batch, jnp.int32)))


def append(cache: KVCache, new: NewKV, count_b: jax.Array, path_bp: jax.Array | None = None) -> KVCache:
    """Commits the first `count_b` of the new positions, or of those that `path_bp` names, in that order.

    All positions are written at `length_b` in one fixed-width store; those past `count_b` are garbage that the next commit
    overwrites. The caller keeps `length_b + width <= capacity`.

    Args:
      count_b: number of positions to keep per sequence. Inside a loop it must depend on the pass that reads the cache
        (`count_after`): stores wait for it, and a store that could come before a read makes XLA copy the cache.
      path_bp: indices of new positions in order of position; None: all of them.
    """

    @jax.jit  # traced once for all arrays of the same shape; XLA inlines the calls
    def store(slots_bnkse: jax.Array, *layers_btke: jax.Array) -> jax.Array:
        new_bntke = jnp.stack(layers_btke, axis=1)
        if path_bp is not None:
            new_bntke = jnp.take_along_axis(new_bntke, path_bp[:, None, :, None, None], axis=2)
        new_bnkpe = sharding.constrain(jnp.swapaxes(new_bntke, 2, 3).astype(slots_bnkse.dtype), AXES)
        new_bnkpe = jnp.where((count_b > 0)[:, None, None, None, None], new_bnkpe, 0)  # see Args
        return indexing.store(slots_bnkse, new_bnkpe, cache.length_b)

    def store_all(arrays: tuple[jax.Array, ...], layers_btke: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        size = arrays[0].shape[1]
        parts = [layers_btke[first : first + size] for first in range(0, len(layers_btke), size)]
        return tuple(store(slots, *part) for slots, part in zip(arrays, parts, strict=True))

    keys, values = zip(*new, strict=True)
    length_b = cache.length_b + count_b.astype(jnp.int32)
    return pin(KVCache(store_all(cache.keys, keys), store_all(cache.values, values), length_b))


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
