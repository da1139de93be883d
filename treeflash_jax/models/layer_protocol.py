"""The protocol of a layer kind: how a decoder layer mixes positions, and what it keeps of committed ones.

A decoder layer computes x + mix(norm x), then x + mlp(norm x). The kind of a layer is its `mix`; attention is one kind.
Sizes come from `ModelConfig.of_kind`, so layers of one model may differ in them.

A pass reads the states of committed positions and never writes them. What `mix` computed for new positions is committed
afterwards, for accepted positions only. One pass therefore serves prompt chunks, single tokens, chains and trees.

A new kind is a file of its own and a line in `layer_kinds.KINDS`; `ModelConfig.layer_types` names the kind of each layer.
tests/test_extending_layer.py has a kind with a recurrent state.

Shape suffixes: b batch, t new positions, u new positions as keys, p committed positions, d model.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import struct
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
        """Returns the state after more positions; those beyond the count are not committed.

        Args:
          new: second result of `LayerKind.mix` for each layer of the state.
          length_b: number of positions committed before.
          count_b: number of positions to commit, maybe 0.
          path_bp: indices of new positions in order of position; None: all of them.
        """

    @abstractmethod
    def axes(self) -> Self:
        """Returns the logical axes (`sharding.Axes`) of every array, in the structure of the state."""

    @abstractmethod
    def grow(self, capacity: int) -> Self:
        """Returns the same state with room for `capacity` positions."""

    def longest_cut(self, length_b: jax.Array, kept_b: jax.Array) -> jax.Array:
        """Returns the largest number of positions, at most `kept_b` of `length_b`, that `cut` can keep."""
        return kept_b

    def cut(self, kept_b: jax.Array) -> Self:
        """Returns the state after only the first `kept_b` positions, a result of `longest_cut`."""
        return self

    def layer(self, index: int) -> Any:
        """Returns the state for `LayerKind.mix`: this one, or its layer `index` if it holds several."""
        return self


@dataclass(frozen=True)
class PassInputs:
    """Inputs of a pass that all layers of a kind share.

    Attributes:
      positions_bt: absolute positions.
      mask_btu: True if new position t sees new position u, itself included; it may be a `PackedMask` in training.
      length_b: number of committed positions, all visible; None without states.
      precomputed: result of `LayerKind.precompute`.
      attention: implementation, a name in `attention.IMPLEMENTATIONS`, or in those of `packed_attention` for its masks.
    """

    positions_bt: jax.Array
    mask_btu: Any
    length_b: jax.Array | None
    precomputed: Any
    attention: str


class LayerKind(ABC):
    """A kind of layer. Programs are compiled for it, so it is immutable; sizes are those of the model's config.

    Attributes:
      shares: name of another kind; None: layers keep a state. A layer that shares keeps none: it reads that of the last
        layer of this other kind before it, and that layer's new positions.
      stacks: whether one state may hold all layers of the kind, for kernels that read one layer where it lies.
      merged: names of the weights that `merge` joins.
    """

    shares: str | None = None
    stacks: bool = False
    merged: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def specs(self, config: ModelConfig, is_merged: bool = False) -> dict[str, Spec]:
        """Returns the specs of the layer's weights, without norms and feed-forward part.

        Args:
          is_merged: whether the specs are those after `merge`.
        """

    def merge(self, params: Params) -> Params:
        """Returns maps of the same input as one array, given the weights in `merged`; as they are if that cannot be."""
        return params

    @abstractmethod
    def init(
        self, config: ModelConfig, batch: int, capacity: int, dtype: DTypeLike, num_layers: int = 1, *, can_cut: bool = True
    ) -> LayerState:
        """Returns the empty state, with room for `capacity` positions.

        Args:
          dtype: dtype of the activations.
          num_layers: number of layers that it holds; 1 unless the kind `stacks`.
          can_cut: whether `cut` must work: then it keeps positions that left the window, and a copy of a recurrent state,
            for sessions.
        """

    def precompute(self, config: ModelConfig, positions_bt: jax.Array, mask_btu: Any) -> Any:
        """Returns arrays of positions and mask that all layers of the kind read, computed once for a pass."""
        return None

    @abstractmethod
    def mix(
        self, params: Params, config: ModelConfig, x_btd: jax.Array, inputs: PassInputs, state: Any, earlier: Any
    ) -> tuple[jax.Array, Any]:
        """Returns the layer's output, to be added to the residual stream, and what `LayerState.commit` takes.

        The second is a tree of arrays [b, t, ...] in order of new positions.

        Args:
          params: the layer's weights.
          x_btd: normed input.
          state: `LayerState.layer` of the layer, which is read only; None: nothing is committed.
          earlier: the second result for positions that are in no state yet; the mask then has columns for them before those
            of the new positions. None: there are none. In a layer that shares, the results of the other layer for these
            positions and the new ones.
        """


def join_positions(earlier: Any, new: Any) -> Any:
    """Returns results of `LayerKind.mix` for earlier positions (None: none) followed by those for new ones."""
    return new if earlier is None else jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), earlier, new)
