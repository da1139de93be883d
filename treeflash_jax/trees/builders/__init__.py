"""Builders that draw nodes at random, so that an acceptance rule can use the law they were drawn from.

A builder is one file with a function `(expander, anchor, num_nodes, shape, noise) -> (DraftTree, Proposal)` and one line in
SAMPLED. At temperature above 0 a deterministic tree accepts at most the verifier's mass on it; a tree of samples loses only
what drafter and verifier disagree about.

What may shape a tree: everything known before a token was drawn. Sampled tokens are never dropped, ranked or rewarded by
their own value: that would change the law they have.
"""

from __future__ import annotations

from treeflash_jax.trees.builders.grow import TreeShape, draw_noise
from treeflash_jax.trees.builders.hybrid import hybrid
from treeflash_jax.trees.builders.paths import delayed, paths
from treeflash_jax.trees.builders.without_replacement import without_replacement
from treeflash_jax.trees.tree import BUILDERS as DETERMINISTIC

SAMPLED = {"paths": paths, "delayed": delayed, "without-replacement": without_replacement, "hybrid": hybrid}
BUILDERS = (*DETERMINISTIC, *SAMPLED)
CHAINS = ("walk", "chain")  # one path, as long as the block unless fewer nodes are asked for

__all__ = ["BUILDERS", "CHAINS", "SAMPLED", "TreeShape", "draw_noise", "law_of"]


def law_of(builder: str, shape: TreeShape) -> str:
    """The kind of law a builder draws from, in the words of the acceptance rules."""
    if builder not in SAMPLED:
        return "deterministic"
    return "one path" if shape.branches == 1 and builder != "hybrid" else builder
