"""Shared parts of the rules that test draws: p (the verifier) and q (the proposal) on the support, and the tests in order.

Every rejection of a draw from q subtracts a multiple of q from the residual. So the residual after some rejections is
max(w p - C q, 0), with one scalar C per node. A rejected deterministic child only removes its token. A node thus has three
scalars (entry weight w, C, and the remaining mass Z), and a draw has one (the part of q that earlier draws left). Arrays
are [b, n, c], [b, x, c] or smaller. The mass of p outside the support does not change, and is one number per node.

Shape suffixes: b batch, n tree nodes, c tokens of a node's support, x draws (n - 1), y draws before them, v vocabulary.

Source: SpecInfer (arXiv 2305.09781) for the tests; the scalar form follows from max(max(p - a q, 0) - b q, 0) =
max(p - (a + b) q, 0).
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from treeflash_jax.acceptance.rule import Rule
from treeflash_jax.acceptance.target import Acceptance, Noise, TargetDistribution, deepest_match, path_to
from treeflash_jax.core import sharding
from treeflash_jax.models import vocab
from treeflash_jax.models.backend.indexing import pick
from treeflash_jax.trees import DraftTree, Proposal, ancestor_mask
from treeflash_jax.trees.sampled.proposal import DETERMINISTIC, WITHOUT_REPLACEMENT

NEVER = 1 << 20  # rank of a test that does not happen
SMALLEST = 1e-30  # if less of q is left, a draw is rejected without a test: still lossless, and the division can't overflow


@struct.dataclass
class Draws:
    """The draws of a tree with the distributions they are tested against.

    Attributes:
      p_bnc: the verifier's probabilities on the support.
      q_bnc: the proposal's probabilities; 0 for deterministic children, and for nodes without draws.
      outside_bn: the verifier's total probability outside the support.
      node_bx: the node of each draw; the root in padding.
      parent_bx: the node below which the token was drawn.
      slot_bx: index of the token in the parent's support.
      rank_bx: number of earlier draws at the parent.
      is_draw_bx: False in padding.
      is_first_bx: False if an earlier draw has the same node.
      is_fixed_bx: True for deterministic children, whose distribution is one-hot.
      is_removed_bx: True for draws without replacement.
      earlier_bxy: True if draw y is an earlier draw at the parent of x.
      depths: the deepest level of the tree; static.
    """

    p_bnc: jax.Array
    q_bnc: jax.Array
    outside_bn: jax.Array
    node_bx: jax.Array
    parent_bx: jax.Array
    slot_bx: jax.Array
    rank_bx: jax.Array
    is_draw_bx: jax.Array
    is_first_bx: jax.Array
    is_fixed_bx: jax.Array
    is_removed_bx: jax.Array
    earlier_bxy: jax.Array
    depths: int = struct.field(pytree_node=False)

    def gather(self, x_bnc: jax.Array) -> jax.Array:
        """Returns the value at the drawn token, for each draw, from its parent's values, [b, x]."""
        return jnp.take_along_axis(pick(x_bnc, self.parent_bx), self.slot_bx[..., None], axis=2)[..., 0]


@struct.dataclass
class Outcome:
    """Results of the tests of all draws, each under the assumption that all earlier draws were rejected.

    Attributes:
      chance_bx: probability that a draw is accepted, given that earlier draws were rejected.
      weight_bn: w, the probability of entering a node.
      left_bnc: what is left of w p on the support.
      keep_bn: probability of stopping at a node after everything below it was rejected.
    """

    chance_bx: jax.Array
    weight_bn: jax.Array
    left_bnc: jax.Array
    keep_bn: jax.Array


def read_draws(tree: DraftTree, proposal: Proposal, p_bnc: jax.Array) -> Draws:
    """Returns the draws of a proposal, given the verifier's probabilities on its support."""
    node_bx = proposal.node_bx
    parent_bx = pick(tree.parent_bn, node_bx)
    is_draw_bx = node_bx > 0
    index_x = jnp.arange(node_bx.shape[1])
    before_bxy = (index_x[:, None] > index_x) & is_draw_bx[..., None] & is_draw_bx[:, None]
    earlier_bxy = (parent_bx[..., None] == parent_bx[:, None]) & before_bxy
    return Draws(
        p_bnc=p_bnc,
        q_bnc=jnp.exp(proposal.log_q_bnc).astype(p_bnc.dtype),
        outside_bn=jnp.maximum(1 - jnp.sum(p_bnc, axis=-1), 0),
        node_bx=node_bx,
        parent_bx=parent_bx,
        slot_bx=proposal.slot_bx,
        rank_bx=jnp.sum(earlier_bxy, axis=-1),
        is_draw_bx=is_draw_bx,
        is_first_bx=is_draw_bx & ~jnp.any(before_bxy & (node_bx[..., None] == node_bx[:, None]), axis=-1),
        is_fixed_bx=proposal.kind_bx == DETERMINISTIC,
        is_removed_bx=proposal.kind_bx == WITHOUT_REPLACEMENT,
        earlier_bxy=earlier_bxy,
        depths=proposal.depths,
    )


def _removals(draws: Draws) -> tuple[jax.Array, jax.Array]:
    """Returns the effects of earlier draws of a node on p and on q.

    The first result is the rank of the deterministic draw that removes a token from p; NEVER if no draw does. The second is
    the part of q that earlier draws leave for each draw without replacement; 1 for other draws.
    """

    def first_ranks(is_chosen_bx: jax.Array) -> jax.Array:
        """Returns, for each node and token, the rank of its first draw among the chosen ones."""
        rank_bx = jnp.where(is_chosen_bx & draws.is_draw_bx, draws.rank_bx, NEVER)
        never_nc = jnp.full(draws.p_bnc.shape[1:], NEVER)
        return jax.vmap(lambda at_x, slot_x, rank_x: never_nc.at[at_x, slot_x].min(rank_x))(
            draws.parent_bx, draws.slot_bx, rank_bx
        )

    gone_bnc = first_ranks(draws.is_fixed_bx)
    drawn_bnc = first_ranks(draws.is_removed_bx)
    # Sums what is left: 1 - q(earlier draws) would lose all digits if the drafter is confident.
    is_spare_bxc = pick(drawn_bnc, draws.parent_bx) >= draws.rank_bx[..., None]
    spare_bx = jnp.sum(jnp.where(is_spare_bxc, pick(draws.q_bnc, draws.parent_bx), 0), axis=-1)
    spare_bx = jnp.where(draws.is_removed_bx & (draws.rank_bx > 0), jnp.where(spare_bx > SMALLEST, spare_bx, 0), 1)
    return gone_bnc, spare_bx


def reject_all(draws: Draws, above_bnn: jax.Array | None = None) -> Outcome:
    """Tests every draw in order, assuming that each is rejected.

    A draw x at a node of weight w is accepted with probability max(w p(x) - C q(x), 0) left / (Z q(x)). After its
    rejection, C grows by Z / left, and `left` loses q(x). A deterministic child x is accepted with probability w p(x) / Z.
    After its rejection, p loses x. Z is the remainder of w p, plus 1 - w.

    Args:
      above_bnn: the ancestor mask, if the weight of a child is the chance of its draw (traversal). None: all weights are
        1, and all parents are processed at once.
    """
    gone_bnc, spare_bx = _removals(draws)
    weighs = above_bnn is not None
    order_bx = draws.rank_bx
    if weighs:  # a draw waits for its parent's weight and for its earlier siblings
        step_bn = _to_nodes(draws.rank_bx + 1, draws.is_first_bx, draws.node_bx, draws.outside_bn.astype(jnp.int32))
        order_bx += pick(jnp.sum(jnp.where(above_bnn, step_bn[:, None], 0), axis=-1), draws.parent_bx)
    order_bx = jnp.where(draws.is_draw_bx, order_bx, -1)
    drawn_p_bx = draws.gather(draws.p_bnc)
    drawn_q_bx = draws.gather(draws.q_bnc)
    gone_at_bx = draws.gather(gone_bnc)
    one_bn = jnp.ones_like(draws.outside_bn)
    counts_bn = jnp.zeros(one_bn.shape, jnp.int32)

    def remaining(weight_bn: jax.Array, scale_bn: jax.Array, tested_bn: jax.Array):
        left_bnc = jnp.maximum(weight_bn[..., None] * draws.p_bnc - scale_bn[..., None] * draws.q_bnc, 0)
        left_bnc = jnp.where(gone_bnc < tested_bn[..., None], 0, left_bnc)
        return left_bnc, jnp.sum(left_bnc, axis=-1) + weight_bn * draws.outside_bn

    def test(state: tuple[jax.Array, ...]):
        turn, chance_bx, weight_bn, scale_bn, mass_bn, tested_bn = state
        now_bx = order_bx == turn
        # Acceptance: the chances of this turn's draws, and with `weighs` the weights of their nodes.
        weight_bx = pick(weight_bn, draws.parent_bx)
        scale_bx = pick(scale_bn, draws.parent_bx)
        mass_bx = pick(mass_bn, draws.parent_bx)
        left_bx = jnp.maximum(weight_bx * drawn_p_bx - scale_bx * drawn_q_bx, 0)
        left_bx = jnp.where(gone_at_bx < draws.rank_bx, 0, left_bx)
        top_bx = jnp.where(draws.is_fixed_bx, left_bx, left_bx * spare_bx)
        bottom_bx = jnp.where(draws.is_fixed_bx, mass_bx, mass_bx * drawn_q_bx)
        accepted_bx = jnp.where(bottom_bx > 0, jnp.minimum(top_bx / jnp.where(bottom_bx > 0, bottom_bx, 1), 1), 0)
        chance_bx = jnp.where(now_bx, accepted_bx, chance_bx)
        if weighs:
            is_entered_bx = now_bx & draws.is_first_bx
            entered_bn = _to_nodes(jnp.ones_like(accepted_bx), is_entered_bx, draws.node_bx, weight_bn)
            entry_bn = _to_nodes(accepted_bx, is_entered_bx, draws.node_bx, weight_bn)
            weight_bn = jnp.where(entered_bn > 0, entry_bn, weight_bn)
        # Rejection: C, the number of tests and Z of the parents.
        growth_bx = jnp.where(spare_bx > 0, mass_bx / jnp.where(spare_bx > 0, spare_bx, 1), 0)
        scale_bn += _to_nodes(growth_bx, now_bx & ~draws.is_fixed_bx, draws.parent_bx, scale_bn)
        touched_bn = _to_nodes(jnp.ones_like(draws.rank_bx), now_bx, draws.parent_bx, tested_bn)
        tested_bn += touched_bn
        remaining_bn = remaining(weight_bn, scale_bn, tested_bn)[1] + (1 - weight_bn)
        mass_bn = jnp.where(touched_bn > 0, remaining_bn, mass_bn)
        return turn + 1, chance_bx, weight_bn, scale_bn, mass_bn, tested_bn

    start = jnp.int32(0), jnp.zeros_like(drawn_p_bx), one_bn, jnp.zeros_like(one_bn), one_bn, counts_bn
    last = jnp.max(order_bx, initial=-1)
    _, chance_bx, weight_bn, scale_bn, _, tested_bn = lax.while_loop(lambda state: state[0] <= last, test, start)
    left_bnc, mass_bn = remaining(weight_bn, scale_bn, tested_bn)
    lost_bn = 1 - weight_bn  # not added to the mass yet: at weight 1, it must be exactly 0
    keep_bn = jnp.where(lost_bn > 0, mass_bn / jnp.where(lost_bn > 0, mass_bn + lost_bn, 1), 1)
    return Outcome(chance_bx=chance_bx, weight_bn=weight_bn, left_bnc=left_bnc, keep_bn=keep_bn)


def reach(tree: DraftTree, draws: Draws, chance_bx: jax.Array) -> jax.Array:
    """Returns the probability that a top-down walk passes each node, [b, n].

    At every node, the walk goes to the child of the first accepted draw.
    """
    missed_bx = jnp.prod(jnp.where(draws.earlier_bxy, 1 - chance_bx[:, None], 1), axis=-1)
    moves_bn = _to_nodes(missed_bx * chance_bx, draws.is_draw_bx, draws.node_bx, draws.outside_bn).at[:, 0].set(1)
    above_bnn = ancestor_mask(tree.parent_bn, draws.depths)
    return jnp.where(tree.valid_bn, jnp.prod(jnp.where(above_bnn, moves_bn[:, None], 1), axis=-1), 0)


def walk_down(tree: DraftTree, draws: Draws, chance_bx: jax.Array, coins_bx: jax.Array) -> jax.Array:
    """Returns the last node of a top-down walk, [b].

    At every node, the walk goes to the child of the first draw with coin < chance.
    """
    is_hit_bx = (coins_bx < chance_bx) & draws.is_draw_bx
    is_chosen_bx = is_hit_bx & ~jnp.any(draws.earlier_bxy & is_hit_bx[:, None], axis=-1)
    hits_bn = _to_nodes(jnp.ones_like(draws.rank_bx), is_chosen_bx, draws.node_bx, jnp.zeros(draws.outside_bn.shape, int))
    return deepest_match(tree, hits_bn > 0, draws.depths + 1)


class DrawsRule(Rule):
    """A rule that tests draws. It reads p only on the support of each node's children."""

    @abstractmethod
    def chances(self, tree: DraftTree, draws: Draws) -> jax.Array:
        """Returns the result of `reach_probabilities` for these draws."""

    @abstractmethod
    def stop(self, tree: DraftTree, draws: Draws, coins_bx: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the last accepted node [b], and what is left of its p on the support [b, c].

        The remainder has the scale of p outside the support.
        """

    def reach_probabilities(self, tree: DraftTree, proposal: Proposal, target: TargetDistribution) -> jax.Array:
        return self._over_draws(self.chances, tree, proposal, target)

    def accept(self, tree: DraftTree, proposal: Proposal, target: TargetDistribution, noise: Noise) -> Acceptance:
        last_b, left_bc = self._over_draws(self.stop, tree, proposal, target, noise.coins_bx)
        residual_bv = target.residual(last_b, pick(proposal.support_bnc, last_b[:, None])[:, 0], left_bc)
        bonus_b = vocab.argmax(residual_bv + noise.bonus_bv)
        return path_to(tree, last_b, bonus_b, noise.gumbel_bpv.shape[1])

    @staticmethod
    def _over_draws(function: Callable, tree: DraftTree, proposal: Proposal, target: TargetDistribution, *coins) -> Any:
        def run(tree: DraftTree, proposal: Proposal, p_bnc: jax.Array, *coins) -> Any:
            return function(tree, read_draws(tree, proposal, p_bnc), *coins)

        return sharding.over_batch(run, tree, proposal, jnp.exp(target.gather(proposal.support_bnc)), *coins)


class TopDownRule(DrawsRule):
    """A rule that goes from the root to the first child that its test accepts."""

    @abstractmethod
    def test_draws(self, draws: Draws) -> tuple[jax.Array, jax.Array]:
        """Returns the chance of each draw, [b, x], and what is left of p on the support of every node, [b, n, c].

        The chance is the probability that the draw is accepted if earlier draws were rejected.
        """

    def chances(self, tree: DraftTree, draws: Draws) -> jax.Array:
        return reach(tree, draws, self.test_draws(draws)[0])

    def stop(self, tree: DraftTree, draws: Draws, coins_bx: jax.Array) -> tuple[jax.Array, jax.Array]:
        chance_bx, left_bnc = self.test_draws(draws)
        last_b = walk_down(tree, draws, chance_bx, coins_bx)
        return last_b, pick(left_bnc, last_b[:, None])[:, 0]


def _to_nodes(value_bx: jax.Array, where_bx: jax.Array, node_bx: jax.Array, like_bn: jax.Array) -> jax.Array:
    """Sums values by node, [b, n]."""
    zero_n = jnp.zeros_like(like_bn[0])
    return jax.vmap(lambda node_x, value_x: zero_n.at[node_x].add(value_x))(
        node_bx, jnp.where(where_bx, value_bx, 0).astype(zero_n.dtype)
    )
