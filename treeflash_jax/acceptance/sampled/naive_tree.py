"""NaiveTree: tests only the first child against its distribution; a token of the residual may match another child.

The rule accepts x_1 with min(1, p / q). Otherwise, it draws y ~ [p - q]+, and goes to the child with token y, if there is
one. This is the same as testing the other children as deterministic ones, so it is recursive rejection with a single
sampled draw per node. For one sampled child with deterministic siblings, it is optimal at the node.

Shape suffixes: b batch, x draws.

Source: NaiveTree in arXiv 2602.16994; SpecHub and greedy drafting (arXiv 2502.18779) for the deterministic siblings.
"""

from dataclasses import replace

import jax

from treeflash_jax.acceptance.sampled.draws import Draws
from treeflash_jax.acceptance.sampled.recursive import Recursive


class NaiveTree(Recursive):
    def test_draws(self, draws: Draws) -> tuple[jax.Array, jax.Array]:
        return super().test_draws(replace(draws, is_fixed_bx=draws.is_fixed_bx | (draws.rank_bx > 0)))
