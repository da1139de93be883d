"""One sampled child first: only the first child is tested against its law; a token of the residual may match the others.

Accept x_1 with min(1, p / q), else y ~ [p - q]+, and go to the child that carries y, if any. Matching y is testing the
other children as if they were deterministic, so this is recursive rejection with a single sampled draw a node. With one
sampled child and deterministic siblings nothing better can be done at the node.

Source: NaiveTree in arXiv 2602.16994; SpecHub and greedy drafting (arXiv 2502.18779) for the deterministic siblings.
"""

from __future__ import annotations

from functools import partial

import jax

from treeflash_jax.acceptance import recursive
from treeflash_jax.acceptance.draws import expect, finish
from treeflash_jax.acceptance.rows import Acceptance, Noise, TargetRows
from treeflash_jax.trees import DraftTree, Proposal

LAWS, NEEDS = recursive.LAWS, recursive.NEEDS


def weights(tree: DraftTree, proposal: Proposal, rows: TargetRows) -> jax.Array:
    """P(all moves from the root to a node), [b, n]."""
    return expect(partial(recursive.chances, sampled_ranks=1), tree, proposal, rows)


def walk(tree: DraftTree, proposal: Proposal, rows: TargetRows, noise: Noise) -> Acceptance:
    """Tests the first draw of a node, then whether the residual's token is another child."""
    return finish(partial(recursive.stop, sampled_ranks=1), tree, proposal, rows, noise)
