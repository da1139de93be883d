"""The cache of a model: the states of its layers, of any kind, and the number of committed positions.

New positions are outside the cache until they are committed, so a verify pass reads the cache and never writes it.

Shape suffixes: b batch, p committed positions.
"""

from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from treeflash_jax.core import sharding
from treeflash_jax.models.config import ModelConfig
from treeflash_jax.models.layer_kinds import KINDS
from treeflash_jax.models.layer_protocol import LayerState


@struct.dataclass
class Cache:
    """States of all layers after the first `length_b` positions of each sequence.

    Attributes:
      states: a state for each layer that keeps one; layers of a kind that stacks may share a state.
      length_b: number of committed positions.
      groups: indices of the layers in each state; static.
    """

    states: tuple[LayerState, ...]
    length_b: jax.Array
    groups: tuple[tuple[int, ...], ...] = struct.field(pytree_node=False)

    @property
    def layers(self) -> tuple[Any, ...]:
        """The part of a state that belongs to each layer, in order of layers; None for a layer that keeps no state."""
        pairs = zip(self.states, self.groups, strict=True)
        by_layer = {layer: state.layer(index) for state, group in pairs for index, layer in enumerate(group)}
        return tuple(by_layer.get(layer) for layer in range(max(by_layer) + 1))

    def axes(self) -> Self:
        """Returns the logical axes of every array, in the structure of the cache."""
        return self.replace(states=tuple(state.axes() for state in self.states), length_b=("batch",))

    def grow(self, capacity: int) -> Self:
        """Copies the cache into one with room for `capacity` positions."""
        return pin(self.replace(states=tuple(state.grow(capacity) for state in self.states)))

    def longest_cut(self, kept_b: jax.Array) -> jax.Array:
        """Returns the largest number of positions, up to `kept_b`, to which `cut` can cut the cache."""
        for state in self.states:
            kept_b = state.longest_cut(self.length_b, kept_b)
        return kept_b

    def cut(self, kept_b: jax.Array) -> Self:
        """Returns a cache of only the first `kept_b` committed positions of each sequence; see `longest_cut`."""
        return self.replace(states=tuple(state.cut(kept_b) for state in self.states), length_b=kept_b)


def allocate(
    config: ModelConfig, batch: int, capacity: int, dtype: DTypeLike, *, stacked: bool = False, can_cut: bool
) -> Cache:
    """Returns an empty cache with room for `capacity` positions of `batch` sequences.

    Args:
      stacked: whether all layers of a kind that stacks share a state.
      can_cut: whether `cut` must work, as sessions need. If so, states also keep positions that left the window, and a copy
        of a recurrent state.
    """
    groups: dict[Any, list[int]] = {}
    for layer, name in enumerate(config.kinds):
        if KINDS[name].shares is not None:
            continue
        groups.setdefault(name if stacked and KINDS[name].stacks else layer, []).append(layer)
    states = []
    for group in groups.values():
        kind = config.kinds[group[0]]
        states.append(KINDS[kind].init(config.of_kind(kind), batch, capacity, dtype, len(group), can_cut=can_cut))
    return pin(Cache(tuple(states), jnp.zeros(batch, jnp.int32), groups=tuple(map(tuple, groups.values()))))


def commit(cache: Cache, new: tuple[Any, ...], count_b: jax.Array, path_bp: jax.Array | None = None) -> Cache:
    """Commits the first `count_b` of the new positions, in order, or the first `count_b` of `path_bp`.

    Slots past `count_b` may get garbage, which the next commit overwrites. The caller must keep `length_b + width <=
    capacity`.

    Args:
      new: `decoder.Output.new`.
      count_b: number of positions to keep per sequence. Inside a loop, it must depend on the pass that reads the cache
        (`count_after`). Stores wait for the count. If XLA could run a store before a read, it would copy the cache.
      path_bp: indices of new positions in order of position; None: all of them.
    """

    @jax.jit  # traced once for all states of the same shape; XLA inlines the calls
    def commit_state(state: LayerState, new: tuple[Any, ...]) -> LayerState:
        return state.commit(new, cache.length_b, count_b, path_bp)

    new_by_state = [tuple(new[layer] for layer in group) for group in cache.groups]
    states = tuple(map(commit_state, cache.states, new_by_state))
    return pin(cache.replace(states=states, length_b=cache.length_b + count_b.astype(jnp.int32)))


def count_after(count_b: jax.Array, computed_b: jax.Array) -> jax.Array:
    """Returns `count_b`, but makes it depend on `computed_b`. Stores of `commit` then follow the pass that reads the cache.

    Note that `lax.optimization_barrier` cannot replace it: XLA removes barriers before it inserts copies (jax 0.10, CPU),
    so every store would copy a cache.

    Args:
      computed_b: numbers that the pass computes; they do not change the result's value.
    """
    return jnp.maximum(count_b, count_b - (computed_b < 0))


def pin(cache: Cache) -> Cache:
    """Constrains a cache to its layout on the ambient mesh, so that loops carry it in this layout."""
    return sharding.pin(cache, cache.axes())
