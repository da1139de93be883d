"""Block verification of one path: keeps the last node that passes its test, even if nodes before it failed theirs.

    w_0 = 1,  w_i = min(1, w_{i-1} p(x_i) / q(x_i)),  S_i = sum [w_i p - q]+ after node i,  h_i = S_i / (S_i + 1 - w_i)

At the end of the path, q = 0 and h = w. The rule keeps the path up to the last node i with coin < h_i (the root is always
kept), and emits a token from [w_i p - q]+. Averaged over the drafts, node i is kept with probability w_i: no rule can do
better on one path.

Shape suffixes: b batch, p places of a path (root included), c tokens of a node's support.

Source: block verification (arXiv 2403.10444).
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from treeflash_jax.acceptance.sampled.draws import Draws, DrawsRule
from treeflash_jax.trees import DraftTree


class BlockVerification(DrawsRule):
    distributions = ("one path",)
    needs = "one sampled path"

    def chances(self, tree: DraftTree, draws: Draws) -> jax.Array:
        return find_pass_chances(_as_path(tree, draws))

    def stop(self, tree: DraftTree, draws: Draws, coins_bx: jax.Array) -> tuple[jax.Array, jax.Array]:
        return find_last_node(_as_path(tree, draws), coins_bx)


@struct.dataclass
class DraftedPath:
    """A drafted path with the distribution that it was drawn from.

    Attributes:
      node_bp: nodes, root first; 0 past the end.
      exists_bp: False past the end.
      ratio_bp: p / q of the token at each place; 1 at the root.
      p_bpc: the verifier's probabilities on the support of each place.
      q_bpc: the proposal's probabilities on the support; 0 at the end of the path.
      outside_bp: the verifier's total probability outside the support.
    """

    node_bp: jax.Array
    exists_bp: jax.Array
    ratio_bp: jax.Array
    p_bpc: jax.Array
    q_bpc: jax.Array
    outside_bp: jax.Array


def weigh_places(path: DraftedPath) -> tuple[jax.Array, jax.Array]:
    """Returns w and h of every place, [b, p]; h is 1 at the root and 0 past the end."""
    log_ratio_bp = jnp.log(path.ratio_bp)

    # Places compose as x -> min(bound, x + step).
    def compose(above: tuple[jax.Array, jax.Array], below: tuple[jax.Array, jax.Array]):
        step_bp, bound_bp = below
        return above[0] + step_bp, jnp.minimum(bound_bp, above[1] + step_bp)

    weight_bp = jnp.exp(lax.associative_scan(compose, (log_ratio_bp, jnp.minimum(log_ratio_bp, 0)), axis=1)[1])
    left_bp = jnp.sum(jnp.maximum(weight_bp[..., None] * path.p_bpc - path.q_bpc, 0), axis=-1)
    left_bp += weight_bp * path.outside_bp
    lost_bp = 1 - weight_bp
    keep_bp = jnp.where(lost_bp > 0, left_bp / jnp.where(lost_bp > 0, left_bp + lost_bp, 1), 1)
    return weight_bp, jnp.where(path.exists_bp, keep_bp, 0)


def find_pass_chances(path: DraftedPath) -> jax.Array:
    """Returns the probability that the kept part of the given path reaches each place, [b, p]."""
    missed_bp = jnp.flip(jnp.cumprod(jnp.flip(1 - weigh_places(path)[1], axis=1), axis=1), axis=1)
    return jnp.where(path.exists_bp, 1 - missed_bp, 0)


def find_last_node(path: DraftedPath, coins_bx: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the last kept node, and what is left of its p on the support. Place p uses coin p - 1."""
    weight_bp, keep_bp = weigh_places(path)
    num_places = weight_bp.shape[1]
    is_hit_bp = jnp.pad(coins_bx[:, : num_places - 1], ((0, 0), (1, 0))) < keep_bp
    place_b1 = jnp.max(jnp.where(is_hit_bp, jnp.arange(num_places), 0), axis=1, keepdims=True)
    weight_b1 = jnp.take_along_axis(weight_bp, place_b1, axis=1)
    last_b1 = jnp.take_along_axis(path.node_bp, place_b1, axis=1)
    p_bc = jnp.take_along_axis(path.p_bpc, place_b1[..., None], axis=1)[:, 0]
    q_bc = jnp.take_along_axis(path.q_bpc, place_b1[..., None], axis=1)[:, 0]
    return last_b1[:, 0], jnp.maximum(p_bc - q_bc / weight_b1, 0)


def _as_path(tree: DraftTree, draws: Draws) -> DraftedPath:
    """Returns a tree of one branch as a path: node p is at depth p."""
    q_bx = draws.gather(draws.q_bnc)
    ratio_bx = jnp.where(draws.is_draw_bx, draws.gather(draws.p_bnc) / jnp.where(q_bx > 0, q_bx, 1), 0)
    return DraftedPath(
        node_bp=jnp.broadcast_to(jnp.arange(tree.tokens_bn.shape[1]), tree.tokens_bn.shape),
        exists_bp=tree.valid_bn,
        ratio_bp=jnp.pad(ratio_bx, ((0, 0), (1, 0)), constant_values=1),
        p_bpc=draws.p_bnc,
        q_bpc=draws.q_bnc,
        outside_bp=draws.outside_bn,
    )
