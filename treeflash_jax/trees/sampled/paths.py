"""`paths` and `delayed`: sampled paths from the anchor, or from the end of a trunk; common prefixes are verified once."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from treeflash_jax.trees.draft_tree import DraftTree
from treeflash_jax.trees.sampled.draw_tokens import draw_tokens, make_outline
from treeflash_jax.trees.sampled.proposal import WITH_REPLACEMENT, Proposal
from treeflash_jax.trees.tree_inputs import TreeInputs, TreeShape


def paths(inputs: TreeInputs) -> tuple[DraftTree, Proposal]:
    """Draws `shape.branches` i.i.d. paths of equal length from the anchor; common prefixes are verified once.

    Source: SpecInfer (arXiv 2305.09781); SpecTr (arXiv 2310.15141).
    """
    return delayed(replace(inputs, shape=replace(inputs.shape, trunk=0)))


def delayed(inputs: TreeInputs) -> tuple[DraftTree, Proposal]:
    """Draws one path of `shape.trunk` tokens, then `shape.branches` i.i.d. paths from its end.

    Near the anchor, drafter and verifier agree, and a second path adds little. Their distance grows with depth. If
    `shape.selector` is given, each sequence has the tree of its list that was chosen for the sequence.

    Source: delayed tree expansion (arXiv 2602.16994).
    """
    limits = inputs.expander.num_depths, inputs.num_nodes, inputs.shape
    sizes = _list_sizes(*limits)
    num_places = delayed_size(*limits)
    outlines = []
    for trunk, branches, length in sizes:  # order of places: first the trunk, then level by level a place for each branch
        parents = [*range(trunk)]
        if length:
            parents += [trunk] * branches
            parents += range(trunk + 1, trunk + 1 + branches * (length - 1))
        outlines.append(make_outline(parents, WITH_REPLACEMENT, num_places=num_places))
    outline = outlines[0]
    if inputs.choice_b is not None:
        outline = jax.tree.map(lambda *x_n: jnp.stack(x_n)[inputs.choice_b], *outlines)
    return draw_tokens(inputs, outline, deepest=max(trunk + length for trunk, _, length in sizes))


def delayed_size(depths: int, num_nodes: int, shape: TreeShape) -> int:
    """Returns the number of nodes of a delayed tree, or of the largest that a tree selector may choose."""
    return max(1 + trunk + branches * length for trunk, branches, length in _list_sizes(depths, num_nodes, shape))


def _list_sizes(depths: int, num_nodes: int, shape: TreeShape) -> Sequence[tuple[int, int, int]]:
    """Returns (trunk, number of branches, their length) of all trees that may be drawn.

    These are the trees of a tree selector, or without one the largest tree that fits.
    """
    if shape.selector is not None:
        return shape.selector.trees
    trunk = min(shape.trunk, num_nodes - 1, depths)
    branches = min(shape.branches, max(num_nodes - 1 - trunk, 1))
    return [(trunk, branches, min((num_nodes - 1 - trunk) // branches, depths - trunk))]
