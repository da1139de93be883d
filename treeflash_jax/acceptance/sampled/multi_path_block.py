"""Greedy multi-path block verification: chooses the largest of K paths in an order by p / q, and verifies it as a block.

At every node, tokens are ordered by p / q (ties by their index in the support). Paths are ordered by their tokens, and the
largest of the K paths is chosen. It has the distribution:

    q'(x | path) = [(A + y + z)^K - (A + y)^K] / [(A + f)^K - A^K],

with f = q(path), A = P(one path comes before it), y = f q(tokens before x), and z = f q(x). The path is verified with q'
instead of q. This pays if q is far from p. If they agree, the order is arbitrary, and the rule accepts less than block
verification of a single path.

Shape suffixes: b batch, n tree nodes, c tokens of a node's support, x draws (n - 1), p places of a path.

Source: greedy multi-path block verification (arXiv 2602.16961).
"""

import jax
import jax.numpy as jnp
from jax import lax

from treeflash_jax.acceptance.sampled import block
from treeflash_jax.acceptance.sampled.block import DraftedPath
from treeflash_jax.acceptance.sampled.draws import Draws, DrawsRule
from treeflash_jax.models.backend.indexing import pick
from treeflash_jax.trees import DraftTree

LARGEST = 1e30  # bound of A / f


class MultiPathBlock(DrawsRule):
    distributions = ("one path", "paths")
    needs = "sampled paths that are independent from the anchor on"

    def chances(self, tree: DraftTree, draws: Draws) -> jax.Array:
        """Returns the probability that a node at or below each one is kept, [b, n], given the tree.

        It is 0 off the chosen path.
        """
        path = _largest_path(draws)
        zero_n = jnp.zeros(draws.p_bnc.shape[1], draws.p_bnc.dtype)
        return jax.vmap(lambda node_p, passed_p: zero_n.at[node_p].max(passed_p))(
            path.node_bp, block.find_pass_chances(path)
        )

    def stop(self, tree: DraftTree, draws: Draws, coins_bx: jax.Array) -> tuple[jax.Array, jax.Array]:
        return block.find_last_node(_largest_path(draws), coins_bx)


def _largest_path(draws: Draws) -> DraftedPath:
    """Returns the largest path with the distribution q' that it has because it is the largest."""
    p_bnc, q_bnc = draws.p_bnc, draws.q_bnc
    possible_bnc = q_bnc > 0
    ratio_bnc = jnp.where(possible_bnc, p_bnc / jnp.where(possible_bnc, q_bnc, 1), jnp.inf)
    order_bnc = jnp.argsort(ratio_bnc, axis=-1, stable=True)
    place_bnc = jnp.argsort(order_bnc, axis=-1)
    sorted_bnc = jnp.take_along_axis(q_bnc, order_bnc, axis=-1)
    below_bnc = jnp.take_along_axis(jnp.cumsum(sorted_bnc, axis=-1) - sorted_bnc, place_bnc, axis=-1)
    place_bx = draws.gather(place_bnc)
    paths_b = jnp.sum((draws.parent_bx == 0) & draws.is_draw_bx, axis=1)

    def step(carry: tuple[jax.Array, ...], _: None):
        node_b, exists_b, before_b = carry  # before = A / f
        here_bx = draws.is_draw_bx & (draws.parent_bx == node_b[:, None]) & exists_b[:, None]
        best_b1 = jnp.argmax(jnp.where(here_bx, place_bx, -1), axis=1, keepdims=True)
        slot_b1 = jnp.take_along_axis(draws.slot_bx, best_b1, axis=1)
        next_b1 = jnp.take_along_axis(draws.node_bx, best_b1, axis=1)
        goes_b1 = jnp.take_along_axis(here_bx, best_b1, axis=1)
        p_bc = pick(p_bnc, node_b[:, None])[:, 0]
        q_bc = pick(q_bnc, node_b[:, None])[:, 0]
        below_bc = pick(below_bnc, node_b[:, None])[:, 0]
        skewed_bc = _skewed(q_bc, below_bc, before_b, paths_b)
        p_b = jnp.take_along_axis(p_bc, slot_b1, axis=1)[:, 0]
        q_b = jnp.take_along_axis(q_bc, slot_b1, axis=1)[:, 0]
        below_b = jnp.take_along_axis(below_bc, slot_b1, axis=1)[:, 0]
        skewed_b = jnp.take_along_axis(skewed_bc, slot_b1, axis=1)[:, 0]
        goes_b = goes_b1[:, 0]
        ratio_b = jnp.where(goes_b, p_b / jnp.where(skewed_b > 0, skewed_b, 1), 0)
        before_b = jnp.where(goes_b, jnp.minimum((before_b + below_b) / jnp.where(goes_b, q_b, 1), LARGEST), before_b)
        q_here_bc = jnp.where(goes_b[:, None], skewed_bc, 0)
        place = node_b, exists_b, p_bc, q_here_bc, pick(draws.outside_bn, node_b[:, None])[:, 0]
        return (jnp.where(goes_b, next_b1[:, 0], 0), goes_b, before_b), (place, ratio_b)

    zero_b = jnp.zeros(p_bnc.shape[:1], draws.node_bx.dtype)
    start = zero_b, zero_b == 0, jnp.zeros(p_bnc.shape[:1], p_bnc.dtype)
    _, ((node_pb, exists_pb, p_pbc, q_pbc, outside_pb), ratio_pb) = lax.scan(step, start, None, length=draws.depths + 1)
    return DraftedPath(
        node_bp=node_pb.T,
        exists_bp=exists_pb.T,
        ratio_bp=jnp.concatenate([jnp.ones_like(ratio_pb[:1]), ratio_pb[:-1]]).T,
        p_bpc=jnp.swapaxes(p_pbc, 0, 1),
        q_bpc=jnp.swapaxes(q_pbc, 0, 1),
        outside_bp=outside_pb.T,
    )


def _skewed(q_bc: jax.Array, below_bc: jax.Array, before_b: jax.Array, paths_b: jax.Array) -> jax.Array:
    """Returns q' as q sum over i < K of high^i low^(K - 1 - i), normalised: a sum of products of numbers in [0, 1]."""
    high_bc = (before_b[:, None] + below_bc + q_bc) / (before_b[:, None] + 1)
    low_bc = (before_b[:, None] + below_bc) / (before_b[:, None] + 1)

    def add(turn: jax.Array, carry: tuple[jax.Array, ...]):
        sum_bc, power_bc = carry
        more_b1 = (turn < paths_b)[:, None]
        return jnp.where(more_b1, high_bc * sum_bc + power_bc, sum_bc), jnp.where(more_b1, low_bc * power_bc, power_bc)

    start = jnp.zeros_like(q_bc), jnp.ones_like(q_bc)
    skewed_bc = q_bc * lax.fori_loop(0, jnp.max(paths_b, initial=0), add, start)[0]
    mass_b1 = jnp.sum(skewed_bc, axis=-1, keepdims=True)
    return skewed_bc / jnp.where(mass_b1 > 0, mass_b1, 1)
