"""What a builder reads of a drafter: an `Expander`. First-order heads hand it a `TransitionTable`.

Shape suffixes: b batch, i draft depth, m previous-token rows, c children kept per row, w lanes: nodes of a level that are
followed.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from treeflash_jax.trees.containers import pick


class Expander(Protocol):
    """What a tree builder may ask of a drafter; `state` is any pytree with leading axes [b, w].

    Attributes:
      num_depths: the deepest level that it can draft.
      is_table: whether everything is computed already and each array starts with the batch axis, so that every device of a
        mesh can build the trees of its own sequences alone. Otherwise `follow` runs a network, once per level.
    """

    @property
    def num_depths(self) -> int: ...

    @property
    def is_table(self) -> bool: ...

    def start(self, width: int) -> Any:
        """The state of the anchor, in every lane."""

    def children(self, depth: jax.Array, state_bw: Any) -> tuple[jax.Array, jax.Array]:
        """Tokens and log-probabilities [b, w, c], likeliest first.

        No token is offered twice: entries with a finite log-probability are distinct ids of the vocabulary. An entry with
        log-probability -inf is no child, and its token is not read.
        """

    def follow(self, depth: jax.Array, state_bw: Any, child_bw: jax.Array) -> Any:
        """The state below the chosen child of each lane."""

    def continues(self, depth: jax.Array, state_bw: Any) -> jax.Array:
        """Whether a child has children of its own to offer, [b, w, c]."""


@struct.dataclass
class TransitionTable:
    """Next-token laws of a first-order drafter, one row per (depth, previous token). Depth 0 has one meaningful row.

    Attributes:
      tokens_bimc: verifier token ids, most probable first.
      log_probs_bimc: log-probabilities, normalised over the whole vocabulary; -inf where a row has fewer children.
      next_row_bimc: the row that continues after this child at the next depth; -1 ends the branch.
    """

    tokens_bimc: jax.Array
    log_probs_bimc: jax.Array
    next_row_bimc: jax.Array

    @property
    def num_depths(self) -> int:
        return self.tokens_bimc.shape[1]

    @property
    def is_table(self) -> bool:
        return True

    def start(self, width: int) -> jax.Array:
        return jnp.zeros((self.tokens_bimc.shape[0], width), jnp.int32)

    def children(self, depth: jax.Array, row_bw: jax.Array) -> tuple[jax.Array, jax.Array]:
        tokens_bwc = _rows(self.tokens_bimc, depth, row_bw)
        log_probs_bwc = _rows(self.log_probs_bimc, depth, row_bw)
        return tokens_bwc, jnp.where((row_bw >= 0)[..., None], log_probs_bwc, -jnp.inf)

    def follow(self, depth: jax.Array, row_bw: jax.Array, child_bw: jax.Array) -> jax.Array:
        next_row_bwc = _rows(self.next_row_bimc, depth, row_bw)
        return jnp.take_along_axis(next_row_bwc, child_bw[..., None], axis=2)[..., 0]

    def continues(self, depth: jax.Array, row_bw: jax.Array) -> jax.Array:
        return _rows(self.next_row_bimc, depth, row_bw) >= 0


def _rows(table_bimc: jax.Array, depth: jax.Array, row_bw: jax.Array) -> jax.Array:
    """Rows `row_bw` of the table at one depth, [b, w, c]; a negative row reads row 0."""
    return pick(table_bimc[:, depth], jnp.maximum(row_bw, 0))
