"""Recursive rejection: tests the children of a node in order, each against the residual that earlier ones left of p.

r = p; for every draw x from q_x: accept with min(1, r(x) / q_x(x)), else r <- [r - q_x]+ / its mass; after the last, emit
from r. With replacement q_x is q each time (SpecInfer), without it q less the siblings before, renormalised (EAGLE,
Sequoia); a deterministic child is one-hot and takes its token out of r.

Source: SpecInfer (arXiv 2305.09781), multi-round; RSD (arXiv 2402.14160); Sequoia (arXiv 2402.12374); EAGLE (arXiv
2401.15077).
"""

from __future__ import annotations

import jax

from treeflash_jax.acceptance.draws import first_hits, make_rule, reach, read_draws, reject_all
from treeflash_jax.acceptance.target import follow
from treeflash_jax.trees import DraftTree, Proposal, pick

DISTRIBUTIONS = ("one path", "paths", "delayed", "without-replacement", "hybrid")
NEEDS = "sampled nodes with their distribution"


def chances(tree: DraftTree, proposal: Proposal, p_bnc: jax.Array, *, sampled_ranks: int | None = None) -> jax.Array:
    """Returns P(all moves from the root to a node), [b, n].

    Args:
      sampled_ranks: draws of this rank and above are tested as deterministic ones; None: as their kind says.
    """
    draws = read_draws(tree, proposal, p_bnc, sampled_ranks=sampled_ranks)
    return reach(tree, draws, reject_all(draws).chance_bx, proposal.depths)


def stop(
    tree: DraftTree, proposal: Proposal, p_bnc: jax.Array, coins_bx: jax.Array, *, sampled_ranks: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Goes to the first child that its test accepts, until there is none."""
    draws = read_draws(tree, proposal, p_bnc, sampled_ranks=sampled_ranks)
    tested = reject_all(draws)
    last_b = follow(tree, first_hits(draws, tested.chance_bx, coins_bx), proposal.depths + 1)
    return last_b, pick(tested.left_bnc, last_b[:, None])[:, 0]


weights, walk = make_rule(chances, stop)
