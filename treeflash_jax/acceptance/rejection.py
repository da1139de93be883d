"""Token-level rejection on one path: accept x with min(1, p(x) / q(x)), stop at the first rejection, emit from [p - q]+.

Source: Leviathan et al. (arXiv 2211.17192); Chen et al. (arXiv 2302.01318).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from treeflash_jax.acceptance.draws import first_hits, make_rule, reach, read_draws
from treeflash_jax.acceptance.target import follow
from treeflash_jax.trees import DraftTree, Proposal, pick

DISTRIBUTIONS = ("one path",)
NEEDS = "one sampled path: it tests a single draw per node"


def _chances(tree: DraftTree, proposal: Proposal, p_bnc: jax.Array) -> jax.Array:
    """Returns the product of min(1, p / q) along each node's path, [b, n]."""
    draws, chance_bx = _test(tree, proposal, p_bnc)
    return reach(tree, draws, chance_bx, proposal.depths)


def _stop(tree: DraftTree, proposal: Proposal, p_bnc: jax.Array, coins_bx: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Accepts draws in order while coin < p / q."""
    draws, chance_bx = _test(tree, proposal, p_bnc)
    last_b = follow(tree, first_hits(draws, chance_bx, coins_bx), proposal.depths + 1)
    return last_b, pick(jnp.maximum(p_bnc - draws.q_bnc, 0), last_b[:, None])[:, 0]


def _test(tree: DraftTree, proposal: Proposal, p_bnc: jax.Array):
    draws = read_draws(tree, proposal, p_bnc)
    p_bx, q_bx = draws.gather(draws.p_bnc), draws.gather(draws.q_bnc)
    return draws, jnp.minimum(p_bx / jnp.where(q_bx > 0, q_bx, 1), 1) * draws.is_draw_bx


weights, walk = make_rule(_chances, _stop)
