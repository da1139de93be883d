"""Token-level rejection on one path: accept x with min(1, p(x) / q(x)), stop at the first rejection, emit from [p - q]+.

Source: Leviathan et al. (arXiv 2211.17192); Chen et al. (arXiv 2302.01318).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from treeflash_jax.acceptance.draws import Draws, make_rule, reach, walk_down
from treeflash_jax.trees import DraftTree, pick

DISTRIBUTIONS = ("one path",)
NEEDS = "one sampled path: it tests a single draw per node"


def _weights(tree: DraftTree, draws: Draws) -> jax.Array:
    """Returns the product of min(1, p / q) along each node's path, [b, n]."""
    return reach(tree, draws, _chances(draws))


def _stop(tree: DraftTree, draws: Draws, coins_bx: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Accepts draws in order while coin < p / q."""
    last_b = walk_down(tree, draws, _chances(draws), coins_bx)
    return last_b, pick(jnp.maximum(draws.p_bnc - draws.q_bnc, 0), last_b[:, None])[:, 0]


def _chances(draws: Draws) -> jax.Array:
    p_bx, q_bx = draws.gather(draws.p_bnc), draws.gather(draws.q_bnc)
    return jnp.minimum(p_bx / jnp.where(q_bx > 0, q_bx, 1), 1) * draws.is_draw_bx


weights, walk = make_rule(_weights, _stop)
