"""Keys and values of committed positions: the state of attention.

Slot s holds absolute position s, except in rings (`KVRing`): a layer with a window keeps only its last `window` positions.
If a cache can be cut, such a layer keeps all positions instead, because the window begins earlier after a cut.

Each layer has an array, or an array (a stack) holds all layers. Attention kernels read one layer inside a stack; other
implementations first copy the layer out. A commit to a stack is one store for keys and one for values.

Shape suffixes: b batch, n layers of an array, t new positions, p committed positions, k key/value heads, s slots, x slots
that are read, e head dim.
"""

from functools import partial
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from treeflash_jax.core import sharding
from treeflash_jax.models.backend import indexing
from treeflash_jax.models.backend.indexing import Pair
from treeflash_jax.models.layer_protocol import LayerState

# Heads come before slots: all positions of a head are then contiguous, as both attention products read them.
AXES: sharding.Axes = ("batch", None, "kv_heads", None, None)
NewKV = tuple[tuple[jax.Array, jax.Array], ...]  # keys and values [b, t, k, e] of each layer


@struct.dataclass
class LayerKV:
    """Keys (after QK-norm and rotation) and values of one layer. The arrays may hold several layers.

    Attributes:
      keys_bnkse, values_bnkse: keys and values of the n layers.
      layer: index of this layer among them, an int32 scalar.
      is_ring: whether slots hold only the last positions; static.
    """

    keys_bnkse: jax.Array
    values_bnkse: jax.Array
    layer: jax.Array
    is_ring: bool = struct.field(pytree_node=False, default=False)

    @property
    def num_slots(self) -> int:
        return self.keys_bnkse.shape[3]

    def read(self, start: int | jax.Array = 0, size: int | None = None) -> tuple[jax.Array, jax.Array]:
        """Returns keys and values [b, k, x, e] of `size` slots from `start` on; None: of all slots."""
        batch, layers, heads, slots, head_dim = self.keys_bnkse.shape
        layer = self.layer if layers > 1 else 0  # with a constant index, XLA reads a single layer without a copy
        first = [jnp.int32(index) for index in (0, layer, 0, start, 0)]
        sizes = batch, 1, heads, size or slots, head_dim
        cut = partial(lax.dynamic_slice, start_indices=first, slice_sizes=sizes, allow_negative_indices=False)
        return cut(self.keys_bnkse)[:, 0], cut(self.values_bnkse)[:, 0]

    def positions(self, length_b: jax.Array) -> jax.Array:
        """Returns the position in each slot after `length_b` positions, [b, s]; [1, s] if it is the same for all sequences.

        Ring slots without a position have a number below 0.
        """
        slots, last_b1 = jnp.arange(self.num_slots), length_b[:, None] - 1
        return last_b1 - (last_b1 - slots) % self.num_slots if self.is_ring else slots[None]

    def last(self, length_b: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns keys and values [b, 1, k, e] at the last of `length_b` positions; garbage if `length_b` is 0."""
        slot = self.copy(jnp.maximum(length_b - 1, 0) % self.num_slots, 1)
        return jnp.swapaxes(slot.keys_bnkse[:, 0], 1, 2), jnp.swapaxes(slot.values_bnkse[:, 0], 1, 2)

    def copy(self, start_b: jax.Array, size: int) -> Self:
        """Returns a copy of `size` slots of each sequence from `start_b` on, as a separate layer."""
        layer = self.layer if self.keys_bnkse.shape[1] > 1 else jnp.int32(0)

        @jax.vmap
        def cut(x_nkse: jax.Array, start: jax.Array) -> jax.Array:
            sizes = 1, x_nkse.shape[1], size, x_nkse.shape[3]
            return lax.dynamic_slice(x_nkse, (layer, jnp.int32(0), start, jnp.int32(0)), sizes)

        return LayerKV(cut(self.keys_bnkse, start_b), cut(self.values_bnkse, start_b), jnp.int32(0))


@struct.dataclass
class KVState(LayerState):
    """Keys and values of n layers; slots beyond the committed positions hold garbage."""

    keys_bnkse: jax.Array
    values_bnkse: jax.Array

    def layer(self, index: int) -> LayerKV:
        return LayerKV(self.keys_bnkse, self.values_bnkse, np.int32(index))

    def axes(self) -> Self:
        return self.replace(keys_bnkse=AXES, values_bnkse=AXES)

    def grow(self, capacity: int) -> Self:
        def pad(x_bnkse: jax.Array) -> jax.Array:
            return jnp.pad(x_bnkse, ((0, 0), (0, 0), (0, 0), (0, capacity - x_bnkse.shape[3]), (0, 0)))

        return self.replace(keys_bnkse=pad(self.keys_bnkse), values_bnkse=pad(self.values_bnkse))

    def commit(self, new: NewKV, length_b: jax.Array, count_b: jax.Array, path_bp: jax.Array | None) -> Self:
        """Writes positions in one store of fixed width for keys and one for values."""

        def arrange(layers_btke: tuple[jax.Array, ...]) -> jax.Array:
            new_bntke = jnp.stack(layers_btke, axis=1)
            if path_bp is not None:
                new_bntke = jnp.take_along_axis(new_bntke, path_bp[:, None, :, None, None], axis=2)
            new_bnkpe = sharding.constrain(jnp.swapaxes(new_bntke, 2, 3).astype(self.keys_bnkse.dtype), AXES)
            return jnp.where((count_b > 0)[:, None, None, None, None], new_bnkpe, 0)  # waits for the count

        keys, values = map(arrange, zip(*new, strict=True))
        keys, values = self._store((self.keys_bnkse, self.values_bnkse), (keys, values), length_b, count_b)
        return self.replace(keys_bnkse=keys, values_bnkse=values)

    def _store(self, slots: Pair, new: Pair, length_b: jax.Array, count_b: jax.Array) -> Pair:
        return indexing.store(slots, new, length_b)  # positions past the count are stored too, but never read


@struct.dataclass
class KVRing(KVState):
    """Keys and values of the last positions of n layers. Position p is in slot p modulo the number of slots.

    Drafted positions enter the ring only when they are accepted, so it need not be larger than the window.

    Attributes:
      window: number of positions that the layers see, including the query's; also the number of slots, unless the cache is
        shorter.
    """

    window: int = struct.field(pytree_node=False, kw_only=True)

    def layer(self, index: int) -> LayerKV:
        return LayerKV(self.keys_bnkse, self.values_bnkse, np.int32(index), is_ring=True)

    def grow(self, capacity: int) -> Self:
        return super().grow(min(capacity, self.window))  # a shorter ring is not full yet

    def longest_cut(self, length_b: jax.Array, kept_b: jax.Array) -> jax.Array:
        return jnp.where(kept_b >= length_b, length_b, 0)

    def _store(self, slots: Pair, new: Pair, length_b: jax.Array, count_b: jax.Array) -> Pair:
        index_bs = self.layer(0).positions(length_b + count_b) - length_b[:, None]
        return indexing.select(slots[0], new[0], index_bs), indexing.select(slots[1], new[1], index_bs)
