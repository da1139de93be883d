"""Heads with a state that follows the drafted path: a recurrent network over the path's tokens corrects marginal logits.

    u_i, state_i = step(state_{i-1}, token before depth i, slot of depth i)
    logits_i(v | path) = marginal_i(v) + <u_i, W[v]>

Such a head runs once per level of a tree, for a few nodes of that level (`lanes`). The children of a node are candidates:
the likeliest tokens of the marginal at their depth. Log-probabilities are normalised over the candidates. The first
`prefix` depths draft from the marginals, normalised over the vocabulary.

Shape suffixes: b batch, n blocks, i draft depth, m = n i contexts, w lanes, x candidates of a depth, d model, s state, k
rank, v vocabulary; `...` is any leading axes.

Source: Domino-Tree (arXiv 2607.08642); DARTree (arXiv 2608.13524) for lanes and candidates.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from treeflash_jax.core.dtypes import at_least_float32
from treeflash_jax.core.parameters import Params
from treeflash_jax.drafters.block.heads.block_head import Block, DrafterSizes, Head, Unembed
from treeflash_jax.drafters.lanes import LaneExpander, LaneState, Level
from treeflash_jax.models import vocab
from treeflash_jax.models.backend import selection


class PathHead(Head):
    """A head whose correction depends on all tokens of the path. `scored` names its only table, W."""

    lanes = 16
    candidates = 64  # as in published trees with such heads

    def prefix(self, drafter: DrafterSizes) -> int:
        """Returns the number of leading depths that draft from the marginals."""
        return 0

    @abstractmethod
    def state_size(self, drafter: DrafterSizes) -> int:
        """Returns the size of the state. The state is 0 before the anchor."""

    @abstractmethod
    def step(
        self, params: Params, unembed: Unembed, state: jax.Array, token: jax.Array, normed: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns u [..., k] and the next state [..., s].

        Args:
          state: state after the previous depth.
          token: token before this depth, [...].
          normed: hidden state, after the final norm, of the slot that predicts this depth; can be broadcast to [..., d].
        """

    def logits(
        self, params: Params, unembed: Unembed, previous_bm: jax.Array, hidden_bmd: jax.Array, drafter: DrafterSizes
    ) -> jax.Array:
        depths = drafter.num_depths
        normed_bmd = unembed.normed(hidden_bmd)
        marginal_bmv = unembed.logits(normed_bmd)
        by_block = lambda x_bm: jnp.moveaxis(x_bm.reshape(x_bm.shape[0], -1, depths, *x_bm.shape[2:]), 2, 0)  # noqa: E731
        previous_ibn, normed_ibnd = by_block(previous_bm), by_block(normed_bmd)

        def advance(state_bns: jax.Array, at: tuple[jax.Array, jax.Array]):
            vectors_bnk, next_bns = self.step(params, unembed, state_bns, *at)
            return next_bns.astype(state_bns.dtype), vectors_bnk

        state_bns = jnp.zeros((*previous_ibn.shape[1:], self.state_size(drafter)), normed_bmd.dtype)
        _, vectors_ibnk = lax.scan(advance, state_bns, (previous_ibn, normed_ibnd))
        is_corrected_i = jnp.arange(depths) >= self.prefix(drafter)
        vectors_ibnk = jnp.where(is_corrected_i[:, None, None, None], vectors_ibnk, 0)
        vectors_bmk = jnp.moveaxis(vectors_ibnk, 0, 2).reshape(*previous_bm.shape, -1)
        return marginal_bmv + vocab.unembed(params[self.scored[0]], vectors_bmk).astype(marginal_bmv.dtype)

    def expand(self, params: Params, unembed: Unembed, block: Block, drafter: DrafterSizes) -> LaneExpander:
        """Returns the children of the anchor, and the recurrent network that continues below them."""
        listed = min(max(drafter.candidates, drafter.children, drafter.shortlist), unembed.unembed_vd.shape[0])
        normed_bid = unembed.normed(block.hidden_bid)
        marginal_biv = unembed.logits(normed_bid)
        dtype = at_least_float32(marginal_biv.dtype)
        scale_b11 = block.temperature_b.astype(dtype)[:, None, None]
        likely_bix, ids_bix = vocab.top_k(marginal_biv, listed)
        tokens_bix = unembed.tokens(ids_bix)
        shared = {
            "params": {name: weight for name, weight in params.items() if name not in self.scored},
            "unembed": unembed,
            "normed": normed_bid,
            "tokens": tokens_bix,
            "likely": likely_bix.astype(dtype) / scale_b11,
            "whole": vocab.log_sum_exp(marginal_biv.astype(dtype) / scale_b11),
            "vectors": vocab.embed(params[self.scored[0]], ids_bix if drafter.owns_vocabulary else tokens_bix),
            "temperature": scale_b11,
        }
        step = PathStep(self, drafter)
        anchor_b1 = block.anchor_b[:, None]
        state_b1s = jnp.zeros((*anchor_b1.shape, self.state_size(drafter)), normed_bid.dtype)
        first = step.offer(shared, jnp.int32(0), state_b1s, anchor_b1)
        positions_unread_b = jnp.zeros_like(block.anchor_b)
        return LaneExpander(shared, positions_unread_b, first, step=step, scratch=(), num_depths=normed_bid.shape[1])


@dataclass(frozen=True)
class PathStep:
    """The `lanes.Step` of a head. Each lane carries the state of its path."""

    head: PathHead
    drafter: DrafterSizes

    def __call__(self, shared: Any, level: Level) -> LaneState:
        return self.offer(shared, level.depth + 1, level.carry, level.token_bw)

    def offer(self, shared: Any, depth: jax.Array, state_bws: jax.Array, token_bw: jax.Array) -> LaneState:
        """Returns the children at this depth and the next state, given the path's state before `token_bw`."""
        at_depth = {
            name: lax.dynamic_index_in_dim(shared[name], depth, axis=1)
            for name in ("normed", "tokens", "likely", "whole", "vectors")
        }
        vectors_bwk, next_bws = self.head.step(shared["params"], shared["unembed"], state_bws, token_bw, at_depth["normed"])
        dtype = shared["likely"].dtype
        change_bwx = jnp.einsum("bwk,bxk->bwx", vectors_bwk, at_depth["vectors"][:, 0], preferred_element_type=dtype)
        is_marginal = depth < self.head.prefix(self.drafter)
        scores_bwx = at_depth["likely"] + jnp.where(is_marginal, 0, change_bwx / shared["temperature"])
        total_bw = jnp.where(is_marginal, at_depth["whole"], jax.nn.logsumexp(scores_bwx, axis=-1))
        values_bwc, at_bwc = selection.top_k(scores_bwx, self.drafter.children)
        tokens_bwc = jnp.take_along_axis(jnp.broadcast_to(at_depth["tokens"], scores_bwx.shape), at_bwc, axis=-1)
        return LaneState(next_bws, (), tokens_bwc, jnp.minimum(values_bwc - total_bw[..., None], 0))
