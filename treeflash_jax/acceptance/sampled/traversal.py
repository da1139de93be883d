"""Traversal verification: tests nodes from the leaves up; a rejected node passes its mass on to the nodes tested later.

A child has weight min(1, w r(x) / q_x(x)), where w r is its parent's remainder. A rejected child leaves [w r - q_x]+ of
that remainder. If all children are rejected, the node itself is kept with probability a = S / (S + 1 - w), where S is the
mass of the remainder, and a token is emitted from the remainder. The root is always kept. The effect of a rejection does
not depend on the subtree below, and all weights assume that earlier tests rejected. So weights are known from the top down:
    P(stop at v) = a_v * product of (1 - a_u) over all u before v in post-order.
On one path, this is block verification.

Shape suffixes: b batch, n tree nodes (i, j in pairs), c tokens of a node's support, x draws (n - 1).

Source: traversal verification (arXiv 2505.12398), with a distribution for every child.
"""

import jax
import jax.numpy as jnp

from treeflash_jax.acceptance.sampled.draws import Draws, DrawsRule, reject_all
from treeflash_jax.models.backend.indexing import pick
from treeflash_jax.trees import DraftTree, ancestor_mask


class Traversal(DrawsRule):
    distributions = ("one path", "paths", "delayed", "without-replacement", "skeleton")
    needs = "sampled nodes with their distribution"

    def chances(self, tree: DraftTree, draws: Draws) -> jax.Array:
        """Returns the probability that the walk stops at or below each node, given the tree, [b, n]."""
        above_bnn = ancestor_mask(tree.parent_bn, draws.depths)
        keep_bn = _kept(tree, reject_all(draws, above_bnn).keep_bn)
        post_bn = _post_order(tree, draws, above_bnn)
        is_before_bnn = post_bn[:, None] < post_bn[..., None]  # [b, i, j]: j before i
        stop_bn = keep_bn * jnp.prod(jnp.where(is_before_bnn, 1 - keep_bn[:, None], 1), axis=-1)
        return jnp.einsum("bij,bi->bj", above_bnn.astype(stop_bn.dtype), stop_bn)

    def stop(self, tree: DraftTree, draws: Draws, coins_bx: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Stops at the first node in post-order whose coin is below its chance; node v uses coin v - 1."""
        above_bnn = ancestor_mask(tree.parent_bn, draws.depths)
        tested = reject_all(draws, above_bnn)
        is_hit_bn = jnp.pad(coins_bx[:, : tree.tokens_bn.shape[1] - 1], ((0, 0), (1, 0))) < _kept(tree, tested.keep_bn)
        post_bn = jnp.where(is_hit_bn, _post_order(tree, draws, above_bnn), tree.tokens_bn.shape[1])
        last_b1 = jnp.argmin(post_bn, axis=1, keepdims=True)
        weight_b1 = jnp.take_along_axis(tested.weight_bn, last_b1, axis=1)
        return last_b1[:, 0], pick(tested.left_bnc, last_b1)[:, 0] / weight_b1


def _kept(tree: DraftTree, keep_bn: jax.Array) -> jax.Array:
    return jnp.where(tree.valid_bn, keep_bn, 0).at[:, 0].set(1)


def _post_order(tree: DraftTree, draws: Draws, above_bnn: jax.Array) -> jax.Array:
    """Returns the post-order index of every node, [b, n]. Siblings are in the order of their draws.

    post(i) = number of nodes below i + sizes of all subtrees that branch off the path to i and were drawn earlier.
    """
    nodes = tree.tokens_bn.shape[1]
    below_bnn = above_bnn & tree.valid_bn[..., None]
    size_bn = jnp.sum(below_bnn, axis=1)
    order_bx = jnp.where(draws.is_first_bx, jnp.arange(nodes - 1), nodes)
    order_bn = jax.vmap(lambda node_x, order_x: jnp.full(nodes, nodes).at[node_x].min(order_x))(draws.node_bx, order_bx)
    are_siblings_bnn = (tree.parent_bn[:, None] == tree.parent_bn[..., None]) & (order_bn[:, None] < order_bn[..., None])
    earlier_bn = jnp.sum(jnp.where(are_siblings_bnn, size_bn[:, None], 0), axis=-1).at[:, 0].set(0)
    post_bn = jnp.sum(jnp.where(above_bnn, earlier_bn[:, None], 0), axis=-1) + size_bn - 1
    return jnp.where(tree.valid_bn, post_bn, nodes)
