"""`without-replacement`: distinct sampled siblings in an outline that is best for an assumed acceptance rate.

Shape suffixes: b batch, n tree nodes (root included), c children kept per node.
"""

import heapq

from treeflash_jax.trees.draft_tree import DraftTree
from treeflash_jax.trees.sampled.draw_tokens import draw_tokens, make_outline
from treeflash_jax.trees.sampled.proposal import WITHOUT_REPLACEMENT, Proposal
from treeflash_jax.trees.tree_inputs import TreeInputs

ACCEPTANCE = 0.7  # assumed chance a that a test accepts; the sibling of rank r is then accepted with chance a (1 - a)^r


def without_replacement(inputs: TreeInputs) -> tuple[DraftTree, Proposal]:
    """Draws up to `shape.branches` distinct children per node. The outline is the best one for a fixed acceptance rate.

    Source: Sequoia (arXiv 2402.12374) for fixed outlines and sampling without replacement; EAGLE (arXiv 2401.15077).
    """
    ranks = min(inputs.shape.branches, inputs.noise_bnc.shape[2])
    parents, siblings = best_outline(inputs.num_nodes - 1, ranks, inputs.expander.num_depths)
    outline = make_outline(parents, WITHOUT_REPLACEMENT, siblings)
    return draw_tokens(inputs, outline, ranks=ranks)


def best_outline(count: int, ranks: int, depths: int) -> tuple[list[int], list[int]]:
    """Returns the parents and the sibling ranks of the `count` places that are reached most often, parents first."""
    parents: list[int] = []
    siblings: list[int] = []
    heap = [(-ACCEPTANCE, 0, 0, 1)] if ranks and depths else []
    while heap and len(parents) < count:
        cost, parent, rank, depth = heapq.heappop(heap)
        parents.append(parent)
        siblings.append(rank)
        if rank + 1 < ranks:
            heapq.heappush(heap, (cost * (1 - ACCEPTANCE), parent, rank + 1, depth))
        if depth < depths:
            heapq.heappush(heap, (cost * ACCEPTANCE, len(parents), 0, depth + 1))
    return parents, siblings
