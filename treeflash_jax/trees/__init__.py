"""Draft trees, and the builders that choose their nodes.

A builder reads a drafter only through an `Expander`. It is one function, and one line in BUILDERS that names it:

    build(expander, anchor_b, num_nodes, shape, noise_bnc) -> (DraftTree, Proposal or None)

One whose `reads_past` says so for a shape is also given `recent_b`, the recent mean of the tokens that a round commits; one
whose shape lists buckets `choice_b`, which of them each sequence takes.

Deterministic builders get no noise and return no proposal: any rule that compares tokens keeps the verifier's distribution.
Builders that draw nodes at random say from which law (`Proposal`, and in words for the acceptance rules): at temperature
above 0 a deterministic tree accepts at most the verifier's mass on it, while acceptance of sampled trees is limited only by
the total variation distance between drafter and verifier.

What may shape a tree: everything known before a token was drawn. Sampled tokens are never dropped, ranked or rewarded by
their own value: that would change the law they have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from treeflash_jax.trees.best_first import best_first
from treeflash_jax.trees.chains import rank_0_chain, walk
from treeflash_jax.trees.containers import (
    DETERMINISTIC,
    NO_TOKEN,
    WITH_REPLACEMENT,
    WITHOUT_REPLACEMENT,
    DraftTree,
    Proposal,
    ancestor_mask,
    first,
    pick,
    root_only,
)
from treeflash_jax.trees.expander import Expander, TransitionTable
from treeflash_jax.trees.grow import draw_noise
from treeflash_jax.trees.hybrid import hybrid
from treeflash_jax.trees.paths import delayed, paths
from treeflash_jax.trees.shape import Bucket, TreeShape
from treeflash_jax.trees.without_replacement import without_replacement

Build = Callable[..., tuple[DraftTree, Proposal | None]]


@dataclass(frozen=True)
class Builder:
    """A way to build trees.

    Attributes:
      build: the function described above.
      law: the law that nodes are drawn from, in the words of the acceptance rules (their LAWS).
      one_path: the law where TreeShape.branches is 1, if that is another one.
      reads_past: whether trees of a shape depend on how past rounds ended.
      is_chain: whether trees have one branch, hence at most as many nodes as the drafter has depths, and the root.
    """

    build: Build
    law: str = "deterministic"
    one_path: str | None = None
    is_chain: bool = False
    reads_past: Callable[[TreeShape], bool] = lambda shape: False

    @property
    def draws(self) -> bool:
        return self.law != "deterministic"

    def law_of(self, shape: TreeShape) -> str:
        return self.one_path if self.one_path and shape.branches == 1 else self.law


def _best_first(expander, anchor_b, num_nodes, shape, noise_bnc) -> tuple[DraftTree, None]:
    return best_first(expander, anchor_b, num_nodes, shape.lanes), None


def _walk(expander, anchor_b, num_nodes, shape, noise_bnc) -> tuple[DraftTree, None]:
    return walk(expander, anchor_b, num_nodes), None


def _rank_0_chain(expander, anchor_b, num_nodes, shape, noise_bnc) -> tuple[DraftTree, None]:
    return rank_0_chain(expander, anchor_b, num_nodes), None


BUILDERS: dict[str, Builder] = {
    "best-first": Builder(_best_first),
    "walk": Builder(_walk, is_chain=True),
    "chain": Builder(_rank_0_chain, is_chain=True),
    "paths": Builder(paths, "paths", "one path"),
    "delayed": Builder(delayed, "delayed", "one path", reads_past=lambda shape: shape.trunk == "auto"),
    "without-replacement": Builder(without_replacement, "without-replacement", "one path"),
    "hybrid": Builder(hybrid, "hybrid"),
}


def draws(name: str) -> bool:
    """Whether a builder draws nodes at random; "none" does not."""
    return name in BUILDERS and BUILDERS[name].draws


def branching() -> list[str]:
    """Names of the builders whose trees may branch."""
    return [name for name, builder in BUILDERS.items() if not builder.is_chain]


__all__ = [
    "BUILDERS",
    "DETERMINISTIC",
    "NO_TOKEN",
    "WITHOUT_REPLACEMENT",
    "WITH_REPLACEMENT",
    "Bucket",
    "Builder",
    "DraftTree",
    "Expander",
    "Proposal",
    "TransitionTable",
    "TreeShape",
    "ancestor_mask",
    "best_first",
    "branching",
    "draw_noise",
    "draws",
    "first",
    "pick",
    "rank_0_chain",
    "root_only",
    "walk",
]
