"""Acceptance rules: how much of a verified draft tree is kept, without changing the verifier's distribution.

A rule is one file with two pure functions and one line in RULES:

    weights(tree, proposal, rows) -> [b, n]   probability that the walk, standing at a node's parent, moves to the node
    walk(tree, proposal, rows, noise) -> Acceptance

`weights` says what to expect, without randomness; `walk` decides, with all noise handed in as arrays.
"""

from __future__ import annotations

from treeflash_jax.acceptance import sample_and_match
from treeflash_jax.acceptance.rows import Acceptance, Noise, TargetRows, target_rows

RULES = {"sample-and-match": sample_and_match}

__all__ = ["RULES", "Acceptance", "Noise", "TargetRows", "target_rows"]
