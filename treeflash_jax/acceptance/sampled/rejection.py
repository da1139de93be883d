"""Token-level rejection on one path: accept x with min(1, p(x) / q(x)), stop at the first rejection, emit from [p - q]+.

Shape suffixes: b batch, n tree nodes, c tokens of a node's support, x draws (n - 1).

Source: Leviathan et al. (arXiv 2211.17192); Chen et al. (arXiv 2302.01318).
"""

import jax
import jax.numpy as jnp

from treeflash_jax.acceptance.sampled.draws import Draws, TopDownRule


class Rejection(TopDownRule):
    distributions = ("one path",)
    needs = "one sampled path: it tests a single draw per node"

    def test_draws(self, draws: Draws) -> tuple[jax.Array, jax.Array]:
        """Returns min(1, p / q) of every draw, [b, x], and [p - q]+ on the support of every node, [b, n, c]."""
        p_bx, q_bx = draws.gather(draws.p_bnc), draws.gather(draws.q_bnc)
        chance_bx = jnp.minimum(p_bx / jnp.where(q_bx > 0, q_bx, 1), 1) * draws.is_draw_bx
        return chance_bx, jnp.maximum(draws.p_bnc - draws.q_bnc, 0)
