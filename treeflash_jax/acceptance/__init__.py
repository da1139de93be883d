"""Acceptance rules: they choose the part of a verified draft tree to keep, without changing the verifier's distribution.

A rule is a `Rule` in a file of its own, and one line in RULES. Rules that test draws are a `draws.DrawsRule`; those that
also go from the root to a child that its test accepts are a `draws.TopDownRule`. They read p on the support of all
children and its mass off it, and form one vector over the vocabulary, for the last accepted node.
"""

from treeflash_jax.acceptance.block import Block
from treeflash_jax.acceptance.k_sequential import KSequential
from treeflash_jax.acceptance.multi_path_block import MultiPathBlock
from treeflash_jax.acceptance.naive_tree import NaiveTree
from treeflash_jax.acceptance.recursive import Recursive
from treeflash_jax.acceptance.rejection import Rejection
from treeflash_jax.acceptance.rule import Rule
from treeflash_jax.acceptance.sample_and_match import SampleAndMatch
from treeflash_jax.acceptance.target import Acceptance, Noise, TargetDistribution, target_distribution
from treeflash_jax.acceptance.traversal import Traversal

RULES: dict[str, Rule] = {
    "sample-and-match": SampleAndMatch(),
    "rejection": Rejection(),
    "recursive": Recursive(),
    "naive-tree": NaiveTree(),
    "k-sequential": KSequential(),
    "block": Block(),
    "traversal": Traversal(),
    "multi-path-block": MultiPathBlock(),
}


def check_lossless(rule: str, distribution: str) -> None:
    """Raises ValueError if a rule would change the verifier's distribution for nodes drawn from this distribution."""
    if distribution not in RULES[rule].distributions:
        fitting = [name for name, other in RULES.items() if distribution in other.distributions]
        raise ValueError(
            f"got acceptance {rule!r} with a tree of distribution {distribution!r}, expected {RULES[rule].needs}; "
            f"lossless here: {', '.join(fitting)}"
        )


__all__ = ["RULES", "Acceptance", "Noise", "Rule", "TargetDistribution", "check_lossless", "target_distribution"]
