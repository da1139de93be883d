"""Acceptance rules: they choose the part of a verified draft tree to keep, without changing the verifier's distribution.

Each rule is a subclass of `Rule` in one file, with one line in RULES. `sample_and_match`, the default for deterministic
trees, is exact for every tree. Rules that test the draws of sampled trees are in `sampled`.
"""

from treeflash_jax.acceptance.rule import Rule
from treeflash_jax.acceptance.sample_and_match import SampleAndMatch
from treeflash_jax.acceptance.sampled.block import BlockVerification
from treeflash_jax.acceptance.sampled.k_sequential import KSequential
from treeflash_jax.acceptance.sampled.multi_path_block import MultiPathBlock
from treeflash_jax.acceptance.sampled.naive_tree import NaiveTree
from treeflash_jax.acceptance.sampled.recursive import Recursive
from treeflash_jax.acceptance.sampled.rejection import Rejection
from treeflash_jax.acceptance.sampled.traversal import Traversal
from treeflash_jax.acceptance.target import Acceptance, Noise, TargetDistribution, target_distribution

RULES: dict[str, Rule] = {
    "sample-and-match": SampleAndMatch(),
    "rejection": Rejection(),
    "recursive": Recursive(),
    "naive-tree": NaiveTree(),
    "k-sequential": KSequential(),
    "block": BlockVerification(),
    "traversal": Traversal(),
    "multi-path-block": MultiPathBlock(),
}


def default_rule(distribution: str) -> str:
    """Returns the name of the default rule for nodes drawn from this distribution.

    Raises ValueError if no rule is lossless for it.
    """
    for name in ("block", "traversal", *RULES):
        if distribution in RULES[name].distributions:
            return name
    raise ValueError(f"got a tree of distribution {distribution!r}, expected one in `distributions` of an acceptance rule")


def check_lossless(rule: str, distribution: str) -> None:
    """Raises ValueError if a rule is not lossless for nodes drawn from this distribution."""
    if distribution not in RULES[rule].distributions:
        fitting = [name for name, other in RULES.items() if distribution in other.distributions]
        raise ValueError(
            f"got acceptance {rule!r} with a tree of distribution {distribution!r}, expected {RULES[rule].needs}; "
            f"lossless here: {', '.join(fitting)}"
        )


__all__ = [
    "RULES", "Acceptance", "Noise", "Rule", "TargetDistribution", "check_lossless", "default_rule", "target_distribution",
]  # fmt: skip
