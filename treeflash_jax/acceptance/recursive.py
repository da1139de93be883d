"""Recursive rejection: test the children of a node one after another, each against what the ones before it left of p.

r = p; for every draw x of law q_x: accept with min(1, r(x) / q_x(x)), else r <- [r - q_x]+ / its mass; after the last, emit
from r. With replacement q_x is q each time (SpecInfer), without it q less the siblings before, renormalised (EAGLE,
Sequoia); a deterministic child is one-hot and takes its token out of r.

Source: SpecInfer (arXiv 2305.09781), multi-round; RSD (arXiv 2402.14160); Sequoia (arXiv 2402.12374); EAGLE (arXiv
2401.15077).
"""

from __future__ import annotations

import jax

from treeflash_jax.acceptance.draws import draws_of, expect, finish, first_hits, reach, reject_all
from treeflash_jax.acceptance.rows import Acceptance, Noise, TargetRows, follow
from treeflash_jax.trees import DraftTree, Proposal, pick

LAWS = ("one path", "paths", "delayed", "without-replacement", "hybrid")
NEEDS = "sampled nodes with their law"


def weights(tree: DraftTree, proposal: Proposal, rows: TargetRows) -> jax.Array:
    """P(all moves from the root to a node), [b, n]."""
    return expect(chances, tree, proposal, rows)


def walk(tree: DraftTree, proposal: Proposal, rows: TargetRows, noise: Noise) -> Acceptance:
    """Goes to the first child that its test accepts, until none is."""
    return finish(stop, tree, proposal, rows, noise)


def chances(tree: DraftTree, proposal: Proposal, p_bnc: jax.Array, *, sampled_ranks: int | None = None) -> jax.Array:
    """`weights`, from p on the support; draws of rank `sampled_ranks` and above are tested as deterministic ones."""
    draws = draws_of(tree, proposal, p_bnc, sampled_ranks=sampled_ranks)
    return reach(tree, draws, reject_all(draws).chance_bx, proposal.depths)


def stop(
    tree: DraftTree, proposal: Proposal, p_bnc: jax.Array, coins_bx: jax.Array, *, sampled_ranks: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """The last accepted node, and what is left of its p on the support."""
    draws = draws_of(tree, proposal, p_bnc, sampled_ranks=sampled_ranks)
    tested = reject_all(draws)
    last_b = follow(tree, first_hits(draws, tested.chance_bx, coins_bx), proposal.depths + 1)
    return last_b, pick(tested.left_bnc, last_b[:, None])[:, 0]
