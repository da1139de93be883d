"""Inputs of tree builders.

Shape suffixes: b batch, n tree nodes, c children kept per node.
"""

from dataclasses import dataclass

import jax

from treeflash_jax.trees.expander import Expander
from treeflash_jax.trees.shape import TreeShape


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
