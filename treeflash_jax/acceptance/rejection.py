"""Token-level rejection on one path: accept x with min(1, p(x) / q(x)), stop at the first rejection, emit from [p - q]+.

Source: Leviathan et al. (arXiv 2211.17192); Chen et al. (arXiv 2302.01318).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from treeflash_jax.acceptance.draws import draws_of, expect, finish, first_hits, reach
from treeflash_jax.acceptance.rows import Acceptance, Noise, TargetRows, follow
from treeflash_jax.trees import DraftTree, Proposal, pick

LAWS = ("one path",)
NEEDS = "one sampled path: it tests a single draw a node"


def weights(tree: DraftTree, proposal: Proposal, rows: TargetRows) -> jax.Array:
    """The product of min(1, p / q) along each node's path, [b, n]."""

    def chances(tree, proposal, p_bnc):
        draws, chance_bx = _tested(tree, proposal, p_bnc)
        return reach(tree, draws, chance_bx, proposal.depths)

    return expect(chances, tree, proposal, rows)


def walk(tree: DraftTree, proposal: Proposal, rows: TargetRows, noise: Noise) -> Acceptance:
    """Accepts draws in order while coin < p / q."""
    return finish(_stop, tree, proposal, rows, noise)


def _stop(tree: DraftTree, proposal: Proposal, p_bnc: jax.Array, coins_bx: jax.Array) -> tuple[jax.Array, jax.Array]:
    draws, chance_bx = _tested(tree, proposal, p_bnc)
    last_b = follow(tree, first_hits(draws, chance_bx, coins_bx), proposal.depths + 1)
    return last_b, pick(jnp.maximum(p_bnc - draws.q_bnc, 0), last_b[:, None])[:, 0]


def _tested(tree: DraftTree, proposal: Proposal, p_bnc: jax.Array):
    draws = draws_of(tree, proposal, p_bnc)
    p_bx, q_bx = draws.here(draws.p_bnc), draws.here(draws.q_bnc)
    return draws, jnp.minimum(p_bx / jnp.where(q_bx > 0, q_bx, 1), 1) * draws.is_draw_bx
