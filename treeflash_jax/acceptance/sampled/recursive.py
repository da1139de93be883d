"""Recursive rejection: tests the children of a node in order, each against the residual of p after the earlier tests.

Start with r = p. For every draw x from q_x, accept it with min(1, r(x) / q_x(x)), else set r <- [r - q_x]+ / its mass.
After the last draw, emit a token from r. With replacement, q_x is always q (SpecInfer). Without replacement, q_x is q
without the earlier siblings, renormalised (EAGLE, Sequoia). For a deterministic child, q_x is one-hot, so that its
rejection removes the child's token from r.

Shape suffixes: b batch, n tree nodes, c tokens of a node's support, x draws (n - 1).

Source: SpecInfer (arXiv 2305.09781), multi-round; RSD (arXiv 2402.14160); Sequoia (arXiv 2402.12374); EAGLE (arXiv
2401.15077).
"""

import jax

from treeflash_jax.acceptance.sampled.draws import Draws, TopDownRule, reject_all


class Recursive(TopDownRule):
    distributions = ("one path", "paths", "delayed", "without-replacement", "skeleton")
    needs = "sampled nodes with their distribution"

    def test_draws(self, draws: Draws) -> tuple[jax.Array, jax.Array]:
        """Returns min(1, r / q_x) of every draw, [b, x], and r after the last test of every node, [b, n, c]."""
        tested = reject_all(draws)
        return tested.chance_bx, tested.left_bnc
