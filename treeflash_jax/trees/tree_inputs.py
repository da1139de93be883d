"""Inputs of tree builders, and the sizes of a draft tree.

Shape suffixes: b batch, n tree nodes, c children kept per node.
"""

from dataclasses import dataclass

import jax

from treeflash_jax.trees.expander import Expander
from treeflash_jax.trees.sampled.tree_selector import TreeSelectorConfig

MAX_NODES = 4096  # largest draft tree


@dataclass(frozen=True, kw_only=True)
class TreeShape:
    """Sizes of a tree other than its number of nodes; static. Each builder reads some of them.

    Attributes:
      branches: number of paths, or maximal number of children per node.
      trunk: number of nodes drafted as one path before the branches (delayed expansion).
      selector: list of delayed trees from which a tree selector chooses; None: all have `trunk` and `branches`.
      skeleton: share of the nodes, without the root, that best-first search chooses (builder "skeleton").
      leaves: whether tokens that end their branch may be drawn where the outline continues below.
      lanes: number of nodes per level whose children best-first search considers; None: all.
    """

    branches: int = 2
    trunk: int = 2
    selector: TreeSelectorConfig | None = None
    skeleton: float = 0.25
    leaves: bool = False
    lanes: int | None = None


@dataclass(frozen=True)
class TreeInputs:
    """Inputs of a builder.

    Attributes:
      expander: the drafter's expander in this round.
      anchor_b: last committed token of each sequence.
      num_nodes: maximal number of nodes, root included; static, at least 1.
      noise_bnc: Gumbel noise from `draw_noise`; None for deterministic builders.
      choice_b: index of each sequence's tree in `shape.selector`; None without a selector.
    """

    expander: Expander
    anchor_b: jax.Array
    num_nodes: int
    shape: TreeShape = TreeShape()
    noise_bnc: jax.Array | None = None
    choice_b: jax.Array | None = None
