"""NaiveTree: tests only the first child against its distribution; a token of the residual may match another child.

Accept x_1 with min(1, p / q), else y ~ [p - q]+, and go to the child with token y, if any. Matching y is testing the other
children as if they were deterministic, so this is recursive rejection with a single sampled draw per node. With one sampled
child and deterministic siblings it is optimal at the node.

Source: NaiveTree in arXiv 2602.16994; SpecHub and greedy drafting (arXiv 2502.18779) for the deterministic siblings.
"""

from dataclasses import replace

import jax

from treeflash_jax.acceptance.sampled.draws import Draws
from treeflash_jax.acceptance.sampled.recursive import Recursive


class NaiveTree(Recursive):
    def test_draws(self, draws: Draws) -> tuple[jax.Array, jax.Array]:
        return super().test_draws(replace(draws, is_fixed_bx=draws.is_fixed_bx | (draws.rank_bx > 0)))
