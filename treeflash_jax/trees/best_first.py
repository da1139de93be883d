"""Best-first search over the continuations of an anchor, as one top-k per level: the default tree.

Shape suffixes: b batch, n tree nodes (root included), c children kept per node, u nodes under the root (n - 1), w lanes
(nodes of a level that are followed), x ledger entries (i u of them, depth-major).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from treeflash_jax.models.backend.indexing import pick
from treeflash_jax.models.backend.levels import over_depths
from treeflash_jax.models.backend.selection import stable_top_k
from treeflash_jax.trees.draft_tree import DraftTree, below_root, root_only
from treeflash_jax.trees.tree_inputs import TreeInputs


def best_first(inputs: TreeInputs) -> tuple[DraftTree, None]:
    """Returns the tree of the `num_nodes - 1` most probable continuations of the anchor.

    A path's score is the sum of its log-probabilities, so no node has a higher score than its parent. Level by level, the
    best nodes so far compete with the children of the nodes added last. So one stable top-k per depth replaces the heap of
    best-first search, and all shapes are static. With few lanes, the result is EAGLE-2's tree, for which the network runs
    once per level and lane.

    Returns:
      A tree in order of decreasing probability. If fewer continuations exist, the tail is padding (`valid_bn` False).

    Source: DDTree (arXiv 2604.12989) section 4 for the objective; TreeFlash (arXiv 2606.03819) for conditional children;
    EAGLE-2 (arXiv 2406.16858) for few lanes.
    """
    return best_first_search(inputs, inputs.num_nodes, inputs.shape.lanes)[0], None


class _Best(NamedTuple):
    """The best nodes after some levels, and the lanes (the nodes whose children are considered next).

    A node is identified by its entry: (the level that added it) * u + (its index among the best nodes after that level).

    Attributes:
      score_bu: log-probabilities of the paths, in decreasing order.
      frontier_bw: log-probabilities of the lanes' paths; -inf if the node is not new.
      entry_bw: entries of the lanes; None: the lanes are the nodes.
    """

    score_bu: jax.Array
    entry_bu: jax.Array
    frontier_bw: jax.Array
    entry_bw: jax.Array | None
    state_bw: Any


def best_first_search(
    inputs: TreeInputs, num_nodes: int, lanes: int | None = None
) -> tuple[DraftTree, jax.Array, jax.Array]:
    """Returns the tree of `best_first`, with these numbers of nodes and lanes instead of those in `inputs`.

    Also returns, for every node, its index in its parent's `Expander.children`, and whether there may be children below it.
    """
    expander, anchor_b, width = inputs.expander, inputs.anchor_b, num_nodes - 1
    if width == 0 or expander.num_depths == 0:
        tree = root_only(anchor_b)
        return tree, jnp.zeros_like(tree.tokens_bn), jnp.full(tree.tokens_bn.shape, expander.num_depths > 0)
    lanes = width if lanes is None else min(lanes, width)
    depths = range(1, min(expander.num_depths, width))
    places = jnp.arange(width, dtype=jnp.int32)

    def add_level(best: _Best, depth: jax.Array):
        tokens_bwc, log_probs_bwc = expander.children(depth, best.state_bw)
        grown_bx = (best.frontier_bw[..., None] + log_probs_bwc).reshape(len(anchor_b), -1)
        score_bu, place_bu = stable_top_k(jnp.concatenate([best.score_bu, grown_bx], axis=1), width)
        is_new_bu = place_bu >= width
        index_bu = jnp.maximum(place_bu - width, 0)  # of new nodes, in `grown_bx`; 0, which is not read, for older nodes
        lane_bu, child_bu = jnp.divmod(index_bu, tokens_bwc.shape[2])
        token_bu = jnp.take_along_axis(tokens_bwc.reshape(grown_bx.shape), index_bu, axis=1)
        open_bx = expander.continues(depth, best.state_bw, tokens_bwc).reshape(grown_bx.shape)
        open_bu = jnp.take_along_axis(open_bx, index_bu, axis=1)
        above_bu = pick(best.entry_bu if best.entry_bw is None else best.entry_bw, lane_bu)
        entry_bu = jnp.where(is_new_bu, depth * width + places, pick(best.entry_bu, place_bu))
        # The next lanes: new nodes only, and the best of them if there are fewer lanes than nodes.
        frontier_bw = jnp.where(is_new_bu, score_bu, -jnp.inf)
        if best.entry_bw is None:
            parent_bw, child_bw, token_bw = lane_bu, child_bu, token_bu
            entry_bw = None
        else:
            frontier_bw, chosen_bw = stable_top_k(frontier_bw, lanes)
            parent_bw = pick(lane_bu, chosen_bw)
            child_bw = pick(child_bu, chosen_bw)
            token_bw = pick(token_bu, chosen_bw)
            entry_bw = pick(entry_bu, chosen_bw)
        parent_state_bw = jax.tree.map(lambda x_bw: pick(x_bw, parent_bw), best.state_bw)
        state_bw = expander.follow(depth, parent_state_bw, child_bw, token_bw)
        # Without the barrier, a GPU recomputes the states of all levels above for every child.
        best = lax.optimization_barrier(_Best(score_bu, entry_bu, frontier_bw, entry_bw, state_bw))
        return best, (above_bu, token_bu, child_bu, open_bu)

    # The anchor's children are the first nodes. Places without a child have score -inf.
    anchor_depth, anchor_state_b1 = jnp.int32(0), expander.start(1)
    tokens_b1c, log_probs_b1c = expander.children(anchor_depth, anchor_state_b1)
    ranks = np.minimum(np.arange(width), tokens_b1c.shape[2] - 1)
    score_bu = jnp.where(np.arange(width) == ranks, log_probs_b1c[:, 0, ranks], -jnp.inf)
    score_bu = jnp.where(score_bu == 0, 0, score_bu)  # top-k ranks -0.0 below the 0.0 of a certain child
    rank_bu = jnp.broadcast_to(jnp.asarray(ranks, jnp.int32), score_bu.shape)
    entry_bu = jnp.broadcast_to(jnp.asarray(places, jnp.int32), score_bu.shape)
    token_bu = tokens_b1c[:, 0, ranks]
    open_bu = expander.continues(anchor_depth, anchor_state_b1, tokens_b1c)[:, 0, ranks]
    state_bw = expander.follow(anchor_depth, expander.start(lanes), rank_bu[:, :lanes], token_bu[:, :lanes])
    best = _Best(score_bu, entry_bu, score_bu[:, :lanes], None if lanes == width else entry_bu[:, :lanes], state_bw)
    # The first level does not read `above`, since its nodes are children of the root.
    best, ledger = over_depths(add_level, best, depths, goes_on=lambda best: jnp.any(best.frontier_bw > -jnp.inf))
    above_ibu, token_ibu, child_ibu, open_ibu = ledger

    def join_levels(first_bu: jax.Array, later_ibu: jax.Array) -> jax.Array:
        return jnp.concatenate([first_bu, jnp.moveaxis(later_ibu, 0, 1).reshape(len(anchor_b), -1)], axis=1)

    above_bx = join_levels(entry_bu, above_ibu)
    token_bx = join_levels(token_bu, token_ibu)
    child_bx = join_levels(rank_bu, child_ibu)
    open_bx = join_levels(open_bu, open_ibu)
    tree = _number_nodes(anchor_b, best, above_bx, token_bx)
    for_root = ((0, 0), (1, 0))
    open_bn = jnp.pad(pick(open_bx, best.entry_bu), for_root, constant_values=True)
    return tree, jnp.pad(pick(child_bx, best.entry_bu), for_root), open_bn & tree.valid_bn


def _number_nodes(anchor_b: jax.Array, best: _Best, above_bx: jax.Array, token_bx: jax.Array) -> DraftTree:
    """Returns the tree of the best nodes after the last level, from the ledger of their tokens and parents' entries."""
    kept_bu = best.entry_bu
    width = kept_bu.shape[1]
    depth_bu = kept_bu // width  # 0 for children of the root
    number_u = jnp.arange(1, width + 1, dtype=jnp.int32)
    node_bx = jax.vmap(lambda kept_u: jnp.zeros_like(above_bx[0]).at[kept_u].set(number_u))(kept_bu)
    parent_bu = jnp.where(depth_bu == 0, 0, pick(node_bx, pick(above_bx, kept_bu)))
    return below_root(anchor_b, pick(token_bx, kept_bu), parent_bu, depth_bu + 1, best.score_bu)
