"""Best-first search over the continuations of an anchor, as one top-k per level: the default tree.

Shape suffixes: b batch, n tree nodes (root included), c children kept per node, w nodes below the root (n - 1), l lanes:
nodes of a level that are followed, x ledger entries (i w of them, depth-major).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from treeflash_jax.models.backend.levels import over_depths
from treeflash_jax.models.backend.selection import stable_top_k
from treeflash_jax.trees.draft_tree import DraftTree, below_root, pick, root_only
from treeflash_jax.trees.tree_inputs import TreeInputs


def best_first(inputs: TreeInputs) -> tuple[DraftTree, None]:
    """Returns the tree of the `num_nodes - 1` most probable continuations of the anchor.

    A path's score is the sum of its log-probabilities, so no node outscores its parent: level by level, the best nodes so
    far compete with the children of the nodes added last. One stable top-k per depth therefore replaces the heap of
    best-first search, and all shapes are static. Few lanes give EAGLE-2's tree, whose network runs once per level and lane.

    Returns:
      A tree in order of decreasing probability. If fewer continuations exist, the tail is padding (`valid_bn` False).

    Source: DDTree (arXiv 2604.12989) section 4 for the objective; TreeFlash (arXiv 2606.03819) for conditional children;
    EAGLE-2 (arXiv 2406.16858) for few lanes.
    """
    return best_first_search(inputs, inputs.num_nodes, inputs.shape.lanes)[0], None


class _Best(NamedTuple):
    """The best nodes after some levels, and the lanes: the nodes whose children are considered next.

    A node is named by its entry: (the level that added it) * w + (its place among the best nodes after that level).

    Attributes:
      score_bw: log-probabilities of the paths, in decreasing order.
      frontier_bl: log-probabilities of the lanes' paths; -inf if the node is not new.
      entry_bl: entries of the lanes; None: the lanes are the nodes.
    """

    score_bw: jax.Array
    entry_bw: jax.Array
    frontier_bl: jax.Array
    entry_bl: jax.Array | None
    state_bl: Any


def best_first_search(
    inputs: TreeInputs, num_nodes: int, lanes: int | None = None
) -> tuple[DraftTree, jax.Array, jax.Array]:
    """Returns the tree of `best_first` and, for every node, its index among siblings and whether it has children.

    Args:
      num_nodes, lanes: numbers of nodes and lanes, instead of those in `inputs`.
    """
    expander, anchor_b, width = inputs.expander, inputs.anchor_b, num_nodes - 1
    if width == 0 or expander.num_depths == 0:
        tree = root_only(anchor_b)
        return tree, jnp.zeros_like(tree.tokens_bn), jnp.full(tree.tokens_bn.shape, expander.num_depths > 0)
    lanes = width if lanes is None else min(lanes, width)
    depths = range(1, min(expander.num_depths, width))
    places = jnp.arange(width, dtype=jnp.int32)

    def add_level(best: _Best, depth: jax.Array):
        tokens_blc, log_probs_blc = expander.children(depth, best.state_bl)
        grown_bx = (best.frontier_bl[..., None] + log_probs_blc).reshape(len(anchor_b), -1)
        score_bw, place_bw = stable_top_k(jnp.concatenate([best.score_bw, grown_bx], axis=1), width)
        is_new_bw, index_bw = place_bw >= width, jnp.maximum(place_bw - width, 0)
        lane_bw, child_bw = jnp.divmod(index_bw, tokens_blc.shape[2])
        token_bw = jnp.take_along_axis(tokens_blc.reshape(grown_bx.shape), index_bw, axis=1)
        open_bw = jnp.take_along_axis(expander.continues(depth, best.state_bl).reshape(grown_bx.shape), index_bw, axis=1)
        above_bw = pick(best.entry_bw if best.entry_bl is None else best.entry_bl, lane_bw)
        entry_bw = jnp.where(is_new_bw, depth * width + places, pick(best.entry_bw, place_bw))
        frontier_bl = jnp.where(is_new_bw, score_bw, -jnp.inf)
        parent_bl, child_bl, entry_bl = lane_bw, child_bw, None
        if best.entry_bl is not None:
            frontier_bl, chosen_bl = stable_top_k(frontier_bl, lanes)
            parent_bl, child_bl, entry_bl = (pick(x_bw, chosen_bl) for x_bw in (lane_bw, child_bw, entry_bw))
        parent_state_bl = jax.tree.map(lambda x_bl: pick(x_bl, parent_bl), best.state_bl)
        state_bl = expander.follow(depth, parent_state_bl, child_bl)
        # Without the barrier a GPU recomputes the states of all levels above for every child.
        best = lax.optimization_barrier(_Best(score_bw, entry_bw, frontier_bl, entry_bl, state_bl))
        return best, (above_bw, token_bw, child_bw, open_bw)

    anchor_depth, anchor_state_b1 = jnp.int32(0), expander.start(1)
    tokens_b1c, log_probs_b1c = expander.children(anchor_depth, anchor_state_b1)
    ranks = np.minimum(np.arange(width), tokens_b1c.shape[2] - 1)
    score_bw = jnp.where(np.arange(width) == ranks, log_probs_b1c[:, 0, ranks], -jnp.inf)
    score_bw = jnp.where(score_bw == 0, 0, score_bw)  # top-k ranks -0.0 below the 0.0 of a certain child
    rank_bw, entry_bw = (jnp.broadcast_to(jnp.asarray(x_w, jnp.int32), score_bw.shape) for x_w in (ranks, places))
    open_bw = expander.continues(anchor_depth, anchor_state_b1)[:, 0, ranks]
    entry_bl = None if lanes == width else entry_bw[:, :lanes]
    state_bl = expander.follow(anchor_depth, expander.start(lanes), rank_bw[:, :lanes])
    best = _Best(score_bw, entry_bw, score_bw[:, :lanes], entry_bl, state_bl)
    # `above` is not read in the first level: its nodes are children of the root.
    best, ledger = over_depths(add_level, best, depths, goes_on=lambda best: jnp.any(best.frontier_bl > -jnp.inf))
    above_bx, token_bx, child_bx, open_bx = (
        jnp.concatenate([x_bw, jnp.moveaxis(x_ibw, 0, 1).reshape(len(anchor_b), -1)], axis=1)
        for x_bw, x_ibw in zip((entry_bw, tokens_b1c[:, 0, ranks], rank_bw, open_bw), ledger, strict=True)
    )

    kept_bw, depth_bw = best.entry_bw, best.entry_bw // width
    node_bx = jax.vmap(lambda kept_w: jnp.zeros_like(above_bx[0]).at[kept_w].set(places + 1))(kept_bw)
    parent_bw = jnp.where(depth_bw == 0, 0, pick(node_bx, pick(above_bx, kept_bw)))
    tree = below_root(anchor_b, pick(token_bx, kept_bw), parent_bw, depth_bw + 1, best.score_bw)
    for_root = ((0, 0), (1, 0))
    open_bn = jnp.pad(pick(open_bx, kept_bw), for_root, constant_values=True)
    return tree, jnp.pad(pick(child_bx, kept_bw), for_root), open_bn & tree.valid_bn
