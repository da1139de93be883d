"""The protocol of an acceptance rule.

Shape suffixes: b batch, n tree nodes.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import jax

from treeflash_jax.acceptance.target import Acceptance, Noise, TargetDistribution
from treeflash_jax.trees import DraftTree, Proposal


class Rule(ABC):
    """Chooses the part of a verified draft tree to keep, without changing the verifier's distribution.

    All coins of a round are keyed by the position of its root, not by the positions of the tokens that they test. If they
    were keyed by the latter, a round after one that ended early would reuse coins that already rejected tokens at the same
    positions, and the block and traversal rules would not be lossless.

    Attributes:
      distributions: names of the distributions of nodes (`trees.Builder.distribution`) for which the rule is lossless.
      needs: the rule's requirement in words, for messages.
    """

    distributions: ClassVar[tuple[str, ...]]
    needs: ClassVar[str]

    @abstractmethod
    def reach_probabilities(self, tree: DraftTree, proposal: Proposal | None, target: TargetDistribution) -> jax.Array:
        """Returns the probability that the accepted path contains each node, averaged over the coins, [b, n]; 0 in padding.

        The sum over the nodes is the expected number of tokens that a round commits.

        Args:
          proposal: distribution that the nodes were drawn from; None for deterministic trees.
          target: the verifier's distribution at every node.
        """

    @abstractmethod
    def accept(self, tree: DraftTree, proposal: Proposal | None, target: TargetDistribution, noise: Noise) -> Acceptance:
        """Returns the accepted path and the token after it. All randomness comes from `noise`."""
