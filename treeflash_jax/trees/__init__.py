"""Draft trees, and the builders that choose their nodes.

A builder reads a drafter only through an `Expander`. It is one function, with one line in BUILDERS:

    build(inputs: TreeInputs) -> (DraftTree, Proposal or None)

A new size that a builder reads is a field of `TreeShape` and, under the same name, of `GenerateConfig`.

Deterministic builders (`best_first`, the default, `walk` and `chain`) return no proposal, because rules that compare tokens
are exact for them. Builders that draw nodes (`sampled`) return the distribution that they draw from (`Proposal`), and
declare its name for the acceptance rules. At temperature above 0, the acceptance of a deterministic tree is limited by the
verifier's probability of its paths. The acceptance of a sampled tree is limited only by the total variation distance
between drafter and verifier.

A tree's shape may depend on everything that is known before its tokens are drawn. Sampled tokens must not be dropped or
ranked by which tokens they are: that would change their distribution.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from treeflash_jax.trees.best_first import best_first
from treeflash_jax.trees.chains import chain, walk
from treeflash_jax.trees.draft_tree import NO_TOKEN, DraftTree, ancestor_mask, first, path_tokens, root_only
from treeflash_jax.trees.expander import Expander, TransitionTable
from treeflash_jax.trees.sampled.draw_tokens import draw_noise
from treeflash_jax.trees.sampled.paths import delayed, delayed_size, paths
from treeflash_jax.trees.sampled.proposal import Proposal
from treeflash_jax.trees.sampled.skeleton import skeleton_chains
from treeflash_jax.trees.sampled.without_replacement import without_replacement
from treeflash_jax.trees.tree_inputs import TreeInputs, TreeShape

Build = Callable[[TreeInputs], tuple[DraftTree, Proposal | None]]


@dataclass(frozen=True)
class Builder:
    """A tree builder and its properties.

    Attributes:
      reads: fields of TreeShape that `build` reads.
      distribution: name of the distribution of the nodes, as in `acceptance.Rule.distributions`.
      one_path: name of the distribution if TreeShape.branches is 1; None: `distribution`.
      is_chain: whether trees have one branch, and so at most one node per depth.
      takes_ngrams: whether n-grams may join the tree; False if children do not depend on the path.
      size: function of depths, maximal number of nodes, and shape. It returns the largest number of nodes of a tree.
    """

    build: Build
    reads: frozenset[str] = frozenset()
    distribution: str = "deterministic"
    one_path: str | None = None
    is_chain: bool = False
    takes_ngrams: bool = True
    size: Callable[[int, int, TreeShape], int] = lambda depths, num_nodes, shape: num_nodes

    @property
    def draws(self) -> bool:
        return self.distribution != "deterministic"

    def distribution_for(self, shape: TreeShape) -> str:
        return self.one_path if self.one_path and shape.branches == 1 else self.distribution


def _chain_size(depths: int, num_nodes: int, shape: TreeShape) -> int:
    return min(num_nodes, depths + 1)


def _paths_size(depths: int, num_nodes: int, shape: TreeShape) -> int:
    return delayed_size(depths, num_nodes, replace(shape, trunk=0))


BUILDERS: dict[str, Builder] = {
    "best-first": Builder(best_first, frozenset({"lanes"})),
    "walk": Builder(walk, is_chain=True, size=_chain_size),
    "chain": Builder(chain, is_chain=True, takes_ngrams=False, size=_chain_size),
    "paths": Builder(paths, frozenset({"branches", "leaves"}), "paths", "one path", size=_paths_size),
    "delayed": Builder(
        delayed, frozenset({"branches", "trunk", "selector", "leaves"}), "delayed", "one path", size=delayed_size
    ),
    "without-replacement": Builder(
        without_replacement, frozenset({"branches", "leaves"}), "without-replacement", "one path"
    ),
    "skeleton": Builder(skeleton_chains, frozenset({"skeleton", "leaves"}), "skeleton"),
}


__all__ = [
    "BUILDERS", "NO_TOKEN", "Builder", "DraftTree", "Expander", "Proposal", "TransitionTable", "TreeInputs", "TreeShape",
    "ancestor_mask", "best_first", "chain", "draw_noise", "first", "path_tokens", "root_only", "walk",
]  # fmt: skip
