"""Recursive rejection: tests the children of a node in order, each against the residual of p after the earlier tests.

r = p; for every draw x from q_x: accept with min(1, r(x) / q_x(x)), else r <- [r - q_x]+ / its mass; after the last, emit
from r. With replacement q_x is q each time (SpecInfer), without it q less the siblings before, renormalised (EAGLE,
Sequoia); a deterministic child is one-hot and takes its token out of r.

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
