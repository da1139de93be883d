"""Acceptance rules: how much of a verified draft tree is kept, without changing the verifier's distribution.

A rule is one file with two pure functions and one line in RULES:

    weights(tree, proposal, rows) -> [b, n]   probability that the accepted path passes each node
    walk(tree, proposal, rows, noise) -> Acceptance

`weights` says what to expect, with the coins averaged out: its sum over the nodes is the number of tokens a round commits.
`walk` decides, with all noise handed in as arrays. LAWS names the proposals a rule is lossless for, NEEDS says why.

Rules work on the support that a node's children were drawn from and on the verifier's mass off it; a row of the vocabulary
is formed only for the node where the walk ends. Coins are fresh every round: tied to a position of the text, a coin that
once rejected would be tossed again after a walk that ended before it, and block and traversal rules would be lossy.
"""

from __future__ import annotations

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
from treeflash_jax.acceptance.rows import Acceptance, Noise, TargetRows, target_rows

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


def check_lawful(rule: str, law: str) -> None:
    """Refuses a rule that would change the verifier's distribution, or cannot be applied, for nodes of this law.

    Raises:
      ValueError: with what the rule needs.
    """
    module = RULES[rule]
    if law not in module.LAWS:
        fitting = [name for name, other in RULES.items() if law in other.LAWS]
        raise ValueError(
            f"got acceptance {rule!r} with a tree of law {law!r}, expected {module.NEEDS}; "
            f"lossless here: {', '.join(fitting)}"
        )


__all__ = ["RULES", "Acceptance", "Noise", "TargetRows", "check_lawful", "target_rows"]
