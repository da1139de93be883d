"""Sampled paths: independent chains of draws, from the anchor or from the end of a common trunk."""

from __future__ import annotations

import jax

from treeflash_jax.trees.containers import WITH_REPLACEMENT, DraftTree, Proposal
from treeflash_jax.trees.expander import Expander
from treeflash_jax.trees.grow import grow, outline
from treeflash_jax.trees.shape import TreeShape


def paths(
    expander: Expander, anchor_b: jax.Array, num_nodes: int, shape: TreeShape, noise_bnc: jax.Array
) -> tuple[DraftTree, Proposal]:
    """`branches` i.i.d. paths from the anchor, of equal length; prefixes in common are verified once.

    Args:
      expander: the drafter's view of one round.
      anchor_b: last committed token of each sequence.
      num_nodes: rows at most, root included; static.
      shape: `branches` counts.
      noise_bnc: Gumbel noise.

    Source: SpecInfer (arXiv 2305.09781); SpecTr (arXiv 2310.15141).
    """
    return _from_trunk(expander, anchor_b, num_nodes, 0, shape, noise_bnc)


def delayed(
    expander: Expander, anchor_b: jax.Array, num_nodes: int, shape: TreeShape, noise_bnc: jax.Array
) -> tuple[DraftTree, Proposal]:
    """One path of `trunk` draws, then `branches` i.i.d. paths from its end.

    Near the anchor drafter and verifier agree and a second path adds little; their distance grows with depth.

    Source: delayed tree expansion (arXiv 2602.16994).
    """
    return _from_trunk(expander, anchor_b, num_nodes, shape.trunk, shape, noise_bnc)


def _from_trunk(expander, anchor_b, num_nodes, trunk, shape: TreeShape, noise_bnc) -> tuple[DraftTree, Proposal]:
    trunk = min(trunk, num_nodes - 1, expander.num_depths)
    branches = min(shape.branches, max(num_nodes - 1 - trunk, 1))
    length = min((num_nodes - 1 - trunk) // branches, expander.num_depths - trunk)
    parents = list(range(trunk))
    for step in range(length):
        parents += [trunk] * branches if step == 0 else [len(parents) - branches + 1 + k for k in range(branches)]
    plan = outline(parents, WITH_REPLACEMENT, anchor_b.shape[0])
    return grow(expander, anchor_b, plan, noise_bnc, leaves=shape.leaves)
