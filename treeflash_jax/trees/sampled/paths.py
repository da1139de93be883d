"""Independent sampled paths from the anchor, or from the end of one sampled path."""

from dataclasses import replace

from treeflash_jax.trees.draft_tree import DraftTree
from treeflash_jax.trees.sampled.draw_tokens import draw_tokens, make_outline
from treeflash_jax.trees.sampled.proposal import WITH_REPLACEMENT, Proposal
from treeflash_jax.trees.shape import TreeShape
from treeflash_jax.trees.tree_inputs import TreeInputs


def paths(inputs: TreeInputs) -> tuple[DraftTree, Proposal]:
    """Draws `shape.branches` i.i.d. paths of equal length from the anchor; common prefixes are verified once.

    Source: SpecInfer (arXiv 2305.09781); SpecTr (arXiv 2310.15141).
    """
    return delayed(replace(inputs, shape=replace(inputs.shape, trunk=0)))


def delayed(inputs: TreeInputs) -> tuple[DraftTree, Proposal]:
    """Draws one path of `shape.trunk` tokens, then `shape.branches` i.i.d. paths from its end.

    Near the anchor drafter and verifier agree and a second path adds little; their distance grows with depth.

    Source: delayed tree expansion (arXiv 2602.16994).
    """
    trunk, branches, length = _fit_paths(inputs.expander.num_depths, inputs.num_nodes, inputs.shape)
    # Place by place: the trunk, then level by level one place for each branch.
    first = [trunk] * branches if length else []
    parents = [*range(trunk), *first, *range(trunk + 1, 1 + trunk + branches * (length - 1))]
    outline = make_outline(parents, WITH_REPLACEMENT)
    return draw_tokens(inputs, outline, deepest=trunk + length)


def delayed_size(depths: int, nodes: int, shape: TreeShape) -> int:
    """Returns the largest number of nodes of a delayed tree, at most `nodes`: all branches have equal length."""
    trunk, branches, length = _fit_paths(depths, nodes, shape)
    return 1 + trunk + branches * length


def _fit_paths(depths: int, num_nodes: int, shape: TreeShape) -> tuple[int, int, int]:
    """Returns the length of the trunk, the number of branches and their length in the largest tree that fits."""
    trunk = min(shape.trunk, num_nodes - 1, depths)
    branches = min(shape.branches, max(num_nodes - 1 - trunk, 1))
    return trunk, branches, min((num_nodes - 1 - trunk) // branches, depths - trunk)
