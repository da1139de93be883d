"""Recursive rejection: tests the children of a node in order, each against the residual that earlier ones left of p.

r = p; for every draw x from q_x: accept with min(1, r(x) / q_x(x)), else r <- [r - q_x]+ / its mass; after the last, emit
from r. With replacement q_x is q each time (SpecInfer), without it q less the siblings before, renormalised (EAGLE,
Sequoia); a deterministic child is one-hot and takes its token out of r.

Source: SpecInfer (arXiv 2305.09781), multi-round; RSD (arXiv 2402.14160); Sequoia (arXiv 2402.12374); EAGLE (arXiv
2401.15077).
"""

from __future__ import annotations

import jax

from treeflash_jax.acceptance.draws import Draws, make_rule, reach, reject_all, walk_down
from treeflash_jax.trees import DraftTree, pick

DISTRIBUTIONS = ("one path", "paths", "delayed", "without-replacement", "hybrid")
NEEDS = "sampled nodes with their distribution"


def chances(tree: DraftTree, draws: Draws) -> jax.Array:
    """Returns P(all moves from the root to a node), [b, n]."""
    return reach(tree, draws, reject_all(draws).chance_bx)


def stop(tree: DraftTree, draws: Draws, coins_bx: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Goes to the first child that its test accepts, until there is none."""
    tested = reject_all(draws)
    last_b = walk_down(tree, draws, tested.chance_bx, coins_bx)
    return last_b, pick(tested.left_bnc, last_b[:, None])[:, 0]


weights, walk = make_rule(chances, stop)
