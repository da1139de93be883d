"""The protocol of a layer kind: how a decoder layer mixes positions, and which state it keeps of committed positions.

A decoder layer computes x + mix(norm x), then x + mlp(norm x). Kinds of layers differ in `mix`; attention is one kind.
Sizes come from `ModelConfig.of_kind`, so layers of one model may differ in them.

A pass reads the states of committed positions and never writes them. Afterwards, the results of `mix` are committed for
accepted positions only. The same pass therefore serves prompt chunks, single tokens, chains and trees.

To add a kind, write a file and add a line to `layer_kinds.KINDS`. `ModelConfig.layer_types` names the kind of each layer.
tests/test_extending_layer.py adds a kind with a recurrent state.

Shape suffixes: b batch, t new positions, u new positions as keys, p committed positions, d model.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jax.typing import DTypeLike

from treeflash_jax.core.parameters import Params, Spec
from treeflash_jax.models.config import ModelConfig


@struct.dataclass
class LayerState(ABC):
    """State of committed positions in one layer, a pytree of arrays whose first axis is the batch.

    If the kind `stacks`, it may hold several layers.
    """

    @abstractmethod
    def commit(self, new: tuple[Any, ...], length_b: jax.Array, count_b: jax.Array, path_bp: jax.Array | None) -> Self:
        """Returns the state after more positions. Positions beyond the count are not committed.

        Args:
          new: for each layer of the state, the second result of `LayerKind.mix`.
          length_b: number of positions that were committed before.
          count_b: number of positions to commit; may be 0.
          path_bp: indices of new positions in order of position; None: all of them.
        """

    @abstractmethod
    def axes(self) -> Self:
        """Returns the logical axes (`sharding.Axes`) of every array, in the structure of the state."""

    @abstractmethod
    def grow(self, capacity: int) -> Self:
        """Returns the same state with room for `capacity` positions."""

    def longest_cut(self, length_b: jax.Array, kept_b: jax.Array) -> jax.Array:
        """Returns the largest number of positions, up to `kept_b` of `length_b`, to which `cut` can cut the state."""
        return kept_b

    def cut(self, kept_b: jax.Array) -> Self:
        """Returns the state after only the first `kept_b` positions; `longest_cut` gives valid numbers."""
        return self

    def layer(self, index: int) -> Any:
        """Returns the state of a single layer for `LayerKind.mix`: this state, or its layer `index` if it holds several."""
        return self


@dataclass(frozen=True)
class PassInputs:
    """Inputs of a pass that all layers of a kind share.

    Attributes:
      positions_bt: absolute positions.
      mask_btu: True if new position t sees new position u. Each position sees itself. In training, may be a `PackedMask`.
      length_b: number of committed positions, all visible; None without states.
      precomputed: result of `LayerKind.precompute`.
      attention: name of an implementation in `attention.IMPLEMENTATIONS`; for a `PackedMask`, in
        `packed_attention.IMPLEMENTATIONS`.
      is_tree: whether the new positions are a tree; otherwise they are texts, one after the other.
    """

    positions_bt: jax.Array
    mask_btu: Any
    length_b: jax.Array | None
    precomputed: Any
    attention: str
    is_tree: bool = False


class LayerKind(ABC):
    """A kind of layer. It must be immutable, because programs are compiled for it. Sizes are in the model's config.

    Attributes:
      shares: name of another kind, from which layers of this kind read; None: layers keep a state. A layer that shares
        reads the state of the last earlier layer of the other kind, and that layer's new positions.
      stacks: whether one state may hold all layers of the kind. Kernels can then read one layer without a copy.
      merged: names of the weights that `merge` joins.
    """

    shares: str | None = None
    stacks: bool = False
    merged: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def specs(self, config: ModelConfig, is_merged: bool = False) -> dict[str, Spec]:
        """Returns the specs of the layer's weights, except norms and the feed-forward part.

        Args:
          is_merged: whether to return the specs of the weights after `merge`.
        """

    def can_merge(self, config: ModelConfig, mesh: Mesh | None) -> bool:
        """Returns whether a mesh can shard the merged weights; None: one device."""
        return True

    def merge(self, params: Params, config: ModelConfig) -> Params:
        """Joins the weights in `merged`, maps of the same input, into one array. Leaves them as they are if it cannot."""
        return params

    @abstractmethod
    def init(
        self, config: ModelConfig, batch: int, capacity: int, dtype: DTypeLike, num_layers: int = 1, *, can_cut: bool
    ) -> LayerState:
        """Returns the empty state, with room for `capacity` positions.

        Args:
          dtype: dtype of the activations.
          num_layers: number of layers in the state; 1 unless the kind `stacks`.
          can_cut: whether `cut` must work, as sessions need. If so, the state also keeps positions that left the window,
            and a copy of a recurrent state.
        """

    def precompute(self, config: ModelConfig, positions_bt: jax.Array, mask_btu: Any) -> Any:
        """Returns arrays that depend only on positions and mask: computed once per pass, for all layers of the kind."""
        return None

    @abstractmethod
    def mix(
        self, params: Params, config: ModelConfig, x_btd: jax.Array, inputs: PassInputs, state: Any, earlier: Any
    ) -> tuple[jax.Array, Any]:
        """Returns the layer's output, which is added to the residual stream, and the values that `LayerState.commit` takes.

        These values are a tree of arrays [b, t, ...] in order of new positions.

        Args:
          params: the layer's weights.
          x_btd: normed input.
          state: result of `LayerState.layer`, which `mix` only reads; None: no position is committed.
          earlier: second results of `mix` for positions that are not yet in a state; None: there are no such positions. The
            mask's columns for them come before the columns of the new positions. A layer that shares gets the other layer's
            results, for these positions and for the new ones.
        """


def join_positions(earlier: Any, new: Any) -> Any:
    """Appends the results of `LayerKind.mix` for new positions to its results for earlier ones (None: there are none)."""
    return new if earlier is None else jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), earlier, new)
