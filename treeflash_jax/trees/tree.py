"""Draft trees: fixed-budget sets of continuations of the anchor, and the deterministic builders that choose them.

A builder reads a drafter only through an `Expander`; a first-order head hands it a `TransitionTable`. Builders that draw
nodes at random are in builders/.

Shape suffixes: b batch, n tree nodes (root included), i draft depth, m previous-token rows, c children kept per row,
w lanes of the frontier (n - 1), x ledger entries (i w of them, depth-major) or draws.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

MOST_NODES = 4096  # of a draft tree


class Expander(Protocol):
    """What a tree builder may ask of a drafter; `state` is any pytree with leading axes [b, w]."""

    @property
    def num_depths(self) -> int: ...

    def start(self, width: int) -> Any:
        """The state of the anchor, in every lane."""

    def children(self, depth: jax.Array, state_bw: Any) -> tuple[jax.Array, jax.Array]:
        """Tokens and log-probabilities [b, w, c], likeliest first; -inf where there is no child."""

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


@struct.dataclass
class DraftTree:
    """A prefix-closed set of continuations of the anchor. Node 0 is the anchor; parents precede children.

    Attributes:
      tokens_bn: token ids; 0 in padding.
      parent_bn: index of the parent; 0 for the root and for padding.
      depth_bn: 0 for the root and for padding.
      log_prob_bn: of the path from the anchor, float32; -inf in padding.
      valid_bn: False in padding, which never matches anything.
    """

    tokens_bn: jax.Array
    parent_bn: jax.Array
    depth_bn: jax.Array
    log_prob_bn: jax.Array
    valid_bn: jax.Array


# How a node came into the tree.
DETERMINISTIC, WITHOUT_REPLACEMENT, WITH_REPLACEMENT = 0, 1, 2


@struct.dataclass
class Proposal:
    """The law that sampled nodes were drawn from; builders of deterministic trees have none.

    The children of a node are tested in the order of their draws. The first sampled child has the law `log_q`; a later one
    has it again (with replacement) or restricted to what is left and renormalised (without). Deterministic children have
    probability 0 under it: they are the law's other part, known before anything was drawn.

    Attributes:
      support_bnc: distinct token ids that the children of a node come from.
      log_q_bnc: their log-probabilities; -inf where a token could not be drawn, everywhere where a node has no draws.
      node_bx: the node each draw landed on, in the order of the tests; i.i.d. duplicates share a node but are tested with
        multiplicity. 0 (the root) where there was no draw.
      slot_bx: where the support of the parent holds the drawn token.
      kind_bx: DETERMINISTIC, WITHOUT_REPLACEMENT or WITH_REPLACEMENT.
      depths: the deepest level a node can have; static.
    """

    support_bnc: jax.Array
    log_q_bnc: jax.Array
    node_bx: jax.Array
    slot_bx: jax.Array
    kind_bx: jax.Array
    depths: int = struct.field(pytree_node=False)


Builder = Callable[[Expander, jax.Array, int], DraftTree]


def best_first(expander: Expander, anchor_b: jax.Array, num_nodes: int) -> DraftTree:
    """Keeps the `num_nodes - 1` most probable continuations of the anchor.

    A path scores the sum of its log-probabilities, so no node outscores its parent: level by level, the best nodes so far
    compete with the children of those that came in last. One stable top-k per depth therefore replaces the heap of
    best-first search, with static shapes and no host step.

    Args:
      expander: the drafter's view of one round.
      anchor_b: last committed token of each sequence.
      num_nodes: budget of verified rows, root included; static, at least 1.

    Returns:
      A tree in order of decreasing probability. Where fewer continuations exist, the tail is padding (`valid_bn` False).

    Source: DDTree (arXiv 2604.12989) section 4 for the objective; TreeFlash (arXiv 2606.03819) for conditional rows.
    """
    return best_first_search(expander, anchor_b, num_nodes)[0]


def best_first_search(expander: Expander, anchor_b: jax.Array, num_nodes: int) -> tuple[DraftTree, jax.Array, jax.Array]:
    """The tree of `best_first`; for every node also its place among the parent's children, and whether it has children."""
    width = num_nodes - 1
    if width == 0 or expander.num_depths == 0:
        tree = root_only(anchor_b)
        return tree, jnp.zeros_like(tree.tokens_bn), jnp.full(tree.tokens_bn.shape, expander.num_depths > 0)
    depths = range(1, min(expander.num_depths, width))
    lanes = jnp.arange(width, dtype=jnp.int32)

    def grow(best, depth):
        score_bw, entry_bw, frontier_bw, state_bw = best
        tokens_bwc, log_probs_bwc = expander.children(depth, state_bw)
        grown_bx = (frontier_bw[..., None] + log_probs_bwc).reshape(len(anchor_b), -1)
        score_bw, place_bw = _stable_top_k(jnp.concatenate([score_bw, grown_bx], axis=1), width)
        is_new_bw, index_bw = place_bw >= width, jnp.maximum(place_bw - width, 0)
        parent_bw, child_bw = jnp.divmod(index_bw, tokens_bwc.shape[2])
        token_bw = jnp.take_along_axis(tokens_bwc.reshape(grown_bx.shape), index_bw, axis=1)
        open_bw = jnp.take_along_axis(expander.continues(depth, state_bw).reshape(grown_bx.shape), index_bw, axis=1)
        above_bw = pick(entry_bw, parent_bw)
        parent_state_bw = jax.tree.map(lambda x_bw: pick(x_bw, parent_bw), state_bw)
        best = (
            score_bw,
            jnp.where(is_new_bw, depth * width + lanes, pick(entry_bw, place_bw)),
            jnp.where(is_new_bw, score_bw, -jnp.inf),
            expander.follow(depth, parent_state_bw, child_bw),
        )
        # Without the barrier a GPU computes the states of all levels above anew, for every child.
        return lax.optimization_barrier(best), (above_bw, token_bw, child_bw, open_bw)

    anchor_depth, anchor_state_b1 = jnp.int32(0), expander.start(1)
    tokens_b1c, log_probs_b1c = expander.children(anchor_depth, anchor_state_b1)
    ranks = np.minimum(np.arange(width), tokens_b1c.shape[2] - 1)
    score_bw = jnp.where(np.arange(width) == ranks, log_probs_b1c[:, 0, ranks], -jnp.inf)
    score_bw = jnp.where(score_bw == 0, 0, score_bw)  # top-k ranks -0.0 below the 0.0 of a certain child
    rank_bw, entry_bw = (jnp.broadcast_to(jnp.asarray(x_w, jnp.int32), score_bw.shape) for x_w in (ranks, lanes))
    open_bw = expander.continues(anchor_depth, anchor_state_b1)[:, 0, ranks]
    best = score_bw, entry_bw, score_bw, expander.follow(anchor_depth, expander.start(width), rank_bw)
    # In the first level nothing reads what lies above: its nodes hang below the root.
    best, ledger = over_depths(grow, best, depths, goes_on=lambda best: jnp.any(best[2] > -jnp.inf))
    above_bx, token_bx, child_bx, open_bx = (
        jnp.concatenate([x_bw, jnp.moveaxis(x_ibw, 0, 1).reshape(len(anchor_b), -1)], axis=1)
        for x_bw, x_ibw in zip((entry_bw, tokens_b1c[:, 0, ranks], rank_bw, open_bw), ledger, strict=True)
    )

    log_prob_bw, kept_bw = best[:2]
    depth_bw = kept_bw // width
    node_bx = jax.vmap(lambda kept_w: jnp.zeros_like(above_bx[0]).at[kept_w].set(lanes + 1))(kept_bw)
    parent_bw = jnp.where(depth_bw == 0, 0, pick(node_bx, pick(above_bx, kept_bw)))
    tree = _below_root(anchor_b, pick(token_bx, kept_bw), parent_bw, depth_bw + 1, log_prob_bw)
    below_root = ((0, 0), (1, 0))
    open_bn = jnp.pad(pick(open_bx, kept_bw), below_root, constant_values=True)
    return tree, jnp.pad(pick(child_bx, kept_bw), below_root), open_bn & tree.valid_bn


def chain(expander: Expander, anchor_b: jax.Array, num_nodes: int) -> DraftTree:
    """A greedy walk: the likeliest child of the token just drafted, until its branch ends."""
    return _chain(expander, anchor_b, num_nodes, expander.follow)


def rank_0_chain(expander: Expander, anchor_b: jax.Array, num_nodes: int) -> DraftTree:
    """The published chain: at each depth the likeliest child of that depth's first row, whatever was drafted before.

    For a marginal table (one row a depth) this is DFlash's chain and equal to `chain`.

    Source: TreeFlash (arXiv 2606.03819), released code; DFlash (arXiv 2602.06036).
    """
    return _chain(expander, anchor_b, num_nodes, lambda depth, state, child: state)


def root_only(anchor_b: jax.Array) -> DraftTree:
    """The tree of plain one-token decoding."""
    zero_b1 = jnp.zeros_like(anchor_b)[:, None]
    return DraftTree(
        tokens_bn=anchor_b[:, None],
        parent_bn=zero_b1,
        depth_bn=zero_b1,
        log_prob_bn=zero_b1.astype(jnp.float32),
        valid_bn=zero_b1 == 0,
    )


BUILDERS: dict[str, Builder] = {"best-first": best_first, "walk": chain, "chain": rank_0_chain}


def first(tree: DraftTree, nodes: int) -> DraftTree:
    """The first nodes of a tree: of a best-first tree, the best-first tree of so many nodes."""
    return jax.tree.map(lambda x_bn: x_bn[:, :nodes], tree)


def ancestor_mask(parent_bn: jax.Array, max_depth: int) -> jax.Array:
    """True at [b, i, j] where node j is node i or one of its ancestors. Bool [b, n, n]."""
    nodes = parent_bn.shape[1]
    word_n, bit_n = np.divmod(np.arange(nodes), 32)
    self_nw = np.where(np.arange(word_n[-1] + 1) == word_n[:, None], 1 << bit_n[:, None], 0).astype(np.uint32)
    bits_bnw, above_bn = jnp.broadcast_to(self_nw, (*parent_bn.shape, self_nw.shape[1])), parent_bn
    # Every step doubles how far up it sees: a chain of `max_depth` gathers takes XLA's GPU compiler exponential time.
    for _ in range(max_depth.bit_length()):
        bits_bnw |= pick(bits_bnw, above_bn)
        above_bn = pick(above_bn, above_bn)
    return (jnp.repeat(bits_bnw, 32, axis=2)[:, :, :nodes] >> bit_n.astype(np.uint32)) & 1 == 1


def over_depths(level: Callable, start: Any, depths: range, goes_on: Callable | None = None) -> tuple[Any, Any]:
    """`lax.scan` of a builder's levels: a loop on a CPU, where that is faster, and unrolled elsewhere.

    Best-first search launches ten kernels a level in a loop on a GPU, and three without one.

    Args:
      level: (carry, depth) -> (carry, what is stacked over the depths).
      start: the first carry.
      depths: of the levels; static.
      goes_on: whether levels below a carry matter; where not, a loop ends and what is stacked of them is 0.
    """

    rows = jax.eval_shape(level, start, jnp.int32(depths.start))[1]
    nothing = jax.tree.map(lambda row: jnp.zeros((len(depths), *row.shape), row.dtype), rows)
    if not depths:
        return start, nothing

    def loop(start: Any) -> tuple[Any, Any]:
        def body(now: Any) -> Any:
            depth, carry, stacked = now
            carry, row = level(carry, depth)
            put = partial(lax.dynamic_update_index_in_dim, index=depth - depths.start, axis=0)
            return depth + 1, carry, jax.tree.map(put, stacked, row)

        def is_on(now: Any) -> jax.Array:
            return (now[0] < depths.stop) & (True if goes_on is None else goes_on(now[1]))

        return lax.while_loop(is_on, body, (jnp.int32(depths.start), start, nothing))[1:]

    unrolled = partial(lax.scan, level, xs=jnp.arange(depths.start, depths.stop, dtype=jnp.int32), unroll=True)
    return lax.platform_dependent(start, cpu=loop, default=unrolled)


def pick(x_bx: jax.Array, index_by: jax.Array) -> jax.Array:
    """x[b, index[b, y], ...]: gathers along the second axis, per sequence."""
    return jax.vmap(lambda x_x, index_y: x_x[index_y])(x_bx, index_by)


def _chain(expander: Expander, anchor_b: jax.Array, num_nodes: int, follow: Callable) -> DraftTree:
    length = min(num_nodes - 1, expander.num_depths)
    if length == 0:
        return root_only(anchor_b)
    best_b1 = jnp.zeros_like(anchor_b)[:, None]

    def step(carry, depth):
        score_b1, state_b1 = carry
        tokens_b1c, log_probs_b1c = expander.children(depth, state_b1)
        score_b1 += log_probs_b1c[..., 0]
        return (score_b1, follow(depth, state_b1, best_b1)), (tokens_b1c[:, 0, 0], score_b1[:, 0])

    state_b1 = expander.start(1)
    dtype = jax.eval_shape(expander.children, jnp.int32(0), state_b1)[1].dtype
    _, (tokens_wb, score_wb) = over_depths(step, (jnp.zeros(best_b1.shape, dtype), state_b1), range(length))
    index_bw = jnp.broadcast_to(jnp.arange(length), (anchor_b.shape[0], length))
    return _below_root(anchor_b, tokens_wb.T, index_bw, index_bw + 1, score_wb.T)


def _below_root(anchor_b, tokens_bw, parent_bw, depth_bw, log_prob_bw) -> DraftTree:
    """The anchor followed by the nodes; nodes of probability zero become padding."""
    valid_bw = jnp.isfinite(log_prob_bw)

    def with_root(root_b, nodes_bw, padding):
        return jnp.concatenate([root_b[:, None], jnp.where(valid_bw, nodes_bw, padding).astype(root_b.dtype)], axis=1)

    zero_b = jnp.zeros_like(anchor_b)
    return DraftTree(
        tokens_bn=with_root(anchor_b, tokens_bw, 0),
        parent_bn=with_root(zero_b, parent_bw, 0),
        depth_bn=with_root(zero_b, depth_bw, 0),
        log_prob_bn=with_root(zero_b.astype(log_prob_bw.dtype), log_prob_bw, -jnp.inf),
        valid_bn=with_root(zero_b == 0, valid_bw, False),
    )


def _stable_top_k(scores_bx: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """`lax.top_k`, the lower index first among equals: so XLA does it on a CPU, elsewhere it takes a stable sort."""

    def by_sort(scores_bx: jax.Array) -> list[jax.Array]:
        order_bx = lax.broadcasted_iota(jnp.int32, scores_bx.shape, 1)
        cost_bx, order_bx = lax.sort((-scores_bx, order_bx), num_keys=1, is_stable=True)
        return [-cost_bx[:, :k], order_bx[:, :k]]

    return lax.platform_dependent(scores_bx, cpu=lambda scores_bx: lax.top_k(scores_bx, k), default=by_sort)


def _rows(table_bimc: jax.Array, depth: jax.Array, row_bw: jax.Array) -> jax.Array:
    """Rows `row_bw` of the table at one depth, [b, w, c]; a negative row reads row 0."""
    return pick(table_bimc[:, depth], jnp.maximum(row_bw, 0))
