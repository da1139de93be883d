"""Acceptance rules: they choose the part of a verified draft tree to keep, without changing the verifier's distribution.

A rule is one file with one line in RULES. It has:

    weights(tree, proposal, target) -> [b, n]
        P(the accepted path passes each node), with the coins averaged out. Its sum over the nodes is the expected number of
        tokens that a round commits.
    walk(tree, proposal, target, noise) -> Acceptance
        the decision, with all noise as arrays
    DISTRIBUTIONS   the proposal distributions (`trees.Builder.distribution`) that the rule is lossless for
    NEEDS           its requirement in words, for messages

Arguments are a `trees.DraftTree`, the `trees.Proposal` its nodes were drawn from (None for deterministic trees), the
verifier's `TargetDistribution` at every node, and `Noise`. `draws.make_rule` makes both functions for rules that test
draws, and `draws.make_top_down_rule` for those of them that go from the root to a child that its test accepts: they read p
on the support of every node's children and its mass off it, and form one vector over the vocabulary, for the last accepted
node.

Coins are keyed by round, not by text position: after a round that ended early, the next one would reuse coins that had
already rejected at the same positions, and block and traversal rules would not be lossless.
"""

from treeflash_jax.acceptance import (
    block,
    k_sequential,
    multi_path_block,
    naive_tree,
    recursive,
    rejection,
    sample_and_match,
    traversal,
)
from treeflash_jax.acceptance.target import Noise, TargetDistribution, target_distribution

RULES = {
    "sample-and-match": sample_and_match,
    "rejection": rejection,
    "recursive": recursive,
    "naive-tree": naive_tree,
    "k-sequential": k_sequential,
    "block": block,
    "traversal": traversal,
    "multi-path-block": multi_path_block,
}


def check_lossless(rule: str, distribution: str) -> None:
    """Raises ValueError if a rule would change the verifier's distribution for nodes drawn from this distribution."""
    module = RULES[rule]
    if distribution not in module.DISTRIBUTIONS:
        fitting = [name for name, other in RULES.items() if distribution in other.DISTRIBUTIONS]
        raise ValueError(
            f"got acceptance {rule!r} with a tree of distribution {distribution!r}, expected {module.NEEDS}; "
            f"lossless here: {', '.join(fitting)}"
        )


__all__ = ["RULES", "Noise", "TargetDistribution", "check_lossless", "target_distribution"]
