"""The protocol between drafters and tree builders (`Expander`), and its subclass for first-order heads (`TransitionTable`).

Shape suffixes: b batch, i draft depth, m contexts (previous tokens of a depth), c children kept per context, w lanes.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from treeflash_jax.models.backend.indexing import pick


class Expander(ABC):
    """A drafter's continuations in one round: a pytree, usually a `flax.struct.dataclass`.

    A builder follows w nodes of a level at a time, each in a lane. `state` describes the path to each node; it is any
    pytree of arrays [b, w, ...]. `depth` is the level of these nodes, an integer array; the anchor is at depth 0.

    A subclass implements `start`, `children` and `follow_token`. It overrides the other methods if it knows a faster way,
    or if some tokens end their branch. The page of drafters (README.md in `drafters`) has an example.

    Attributes:
      num_depths: the deepest level that it can draft. It is static: a field, property or class attribute of the subclass.
      is_table: whether everything is already computed and each array starts with the batch axis. Every device of a mesh
        then builds the trees of its sequences. Otherwise, `follow_token` may run a network, once per level.
    """

    num_depths: int
    is_table: ClassVar[bool] = False

    @abstractmethod
    def start(self, width: int) -> Any:
        """Returns the state of the anchor, in each of `width` lanes."""

    @abstractmethod
    def children(self, depth: jax.Array, state_bw: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the tokens and the log-probabilities of the nodes' children, [b, w, c], likeliest first.

        Entries with a finite log-probability are distinct ids of the verifier's vocabulary; their probabilities add up to
        at most 1. An entry with log-probability -inf is no child, and its token is not read. c is the same at all depths.
        """

    @abstractmethod
    def follow_token(self, depth: jax.Array, state_bw: Any, token_bw: jax.Array) -> Any:
        """Returns the state below one token of each node. The token may be no child, since n-grams propose other tokens."""

    def follow(self, depth: jax.Array, state_bw: Any, child_bw: jax.Array, token_bw: jax.Array) -> Any:
        """Returns the state below one child of each node, given by its index in `children` and its token."""
        return self.follow_token(depth, state_bw, token_bw)

    def continues_below(self, depth: jax.Array, state_bw: Any, tokens_bwx: jax.Array) -> jax.Array:
        """Returns whether there are children below each token, [b, w, x]. The default: except at the last depth."""
        return jnp.broadcast_to(depth + 1 < self.num_depths, tokens_bwx.shape)

    def continues(self, depth: jax.Array, state_bw: Any, tokens_bwc: jax.Array) -> jax.Array:
        """Returns `continues_below` for the nodes' children, given all their tokens in the order of `children`."""
        return self.continues_below(depth, state_bw, tokens_bwc)


@struct.dataclass
class TransitionTable(Expander):
    """Next-token distributions of a first-order drafter, one per context. Depth 0 has one context, the anchor.

    Attributes:
      tokens_bimc: verifier token ids, most probable first.
      log_probs_bimc: log-probabilities, normalised over the whole vocabulary; -inf for missing children.
      next_context_bimc: context of each child at the next depth; -1 ends the branch.
    """

    tokens_bimc: jax.Array
    log_probs_bimc: jax.Array
    next_context_bimc: jax.Array
    is_table = True

    @property
    def num_depths(self) -> int:
        return self.tokens_bimc.shape[1]

    def start(self, width: int) -> jax.Array:
        return jnp.zeros((self.tokens_bimc.shape[0], width), jnp.int32)

    def children(self, depth: jax.Array, context_bw: jax.Array) -> tuple[jax.Array, jax.Array]:
        tokens_bwc = _entries(self.tokens_bimc, depth, context_bw)
        log_probs_bwc = _entries(self.log_probs_bimc, depth, context_bw)
        return tokens_bwc, jnp.where((context_bw >= 0)[..., None], log_probs_bwc, -jnp.inf)

    def follow(self, depth: jax.Array, context_bw: jax.Array, child_bw: jax.Array, token_bw: jax.Array) -> jax.Array:
        return jnp.take_along_axis(self.next_contexts(depth, context_bw), child_bw[..., None], axis=2)[..., 0]

    def continues(self, depth: jax.Array, context_bw: jax.Array, tokens_bwc: jax.Array) -> jax.Array:
        return self.next_contexts(depth, context_bw) >= 0

    def follow_token(self, depth: jax.Array, context_bw: jax.Array, token_bw: jax.Array) -> jax.Array:
        """Returns the context below a token; -1 if it ends the branch or is no child."""
        return self._below(depth, context_bw, token_bw[..., None])[..., 0]

    def continues_below(self, depth: jax.Array, context_bw: jax.Array, tokens_bwx: jax.Array) -> jax.Array:
        return self._below(depth, context_bw, tokens_bwx) >= 0

    def _below(self, depth: jax.Array, context_bw: jax.Array, tokens_bwx: jax.Array) -> jax.Array:
        listed_bwc, log_probs_bwc = self.children(depth, context_bw)
        same_bwxc = (tokens_bwx[..., None] == listed_bwc[..., None, :]) & jnp.isfinite(log_probs_bwc)[..., None, :]
        return jnp.max(jnp.where(same_bwxc, self.next_contexts(depth, context_bw)[..., None, :], -1), axis=-1)

    def next_contexts(self, depth: jax.Array, context_bw: jax.Array) -> jax.Array:
        """Returns the context of each child at the next depth, [b, w, c]; -1 ends the branch."""
        return _entries(self.next_context_bimc, depth, context_bw)


def _entries(table_bimc: jax.Array, depth: jax.Array, context_bw: jax.Array) -> jax.Array:
    """Returns the table's entries for contexts of one depth, [b, w, c]. A negative context reads context 0."""
    return pick(table_bimc[:, depth], jnp.maximum(context_bw, 0))
