"""The tree selector: a small network that chooses a tree from a list, for every sequence and round.

It only reads what is known before the round's tokens are drawn (FEATURES). So whatever it chooses, the nodes of the chosen
tree have the distribution that acceptance rules test.

Shape suffixes: b batch, f features, a trees of the list, d width.

Source: neural selector of delayed tree expansion (arXiv 2602.16994), section 5, with more inputs and wider layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import jax

from treeflash_jax.core.checks import expect
from treeflash_jax.core.parameters import Spec
from treeflash_jax.core.settings import setting, validate

MOST_TREES = 12
MOST_NODES = 60  # limit on each number of a tree: nodes of the trunk, number of branches, length of branches
WIDTHS = 64, 32
FEATURES = (
    "mean length of recent rounds", "length of the last round", "drafter's entropy below the anchor",
    "its largest probability", "log of the text's length", "temperature", "top-p",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TreeSelectorConfig:
    """Trees to choose from, and the pair and rule that the selector was trained for."""

    trees: tuple[tuple[int, int, int], ...] = setting(
        help="trunk, number of branches and their length, of every tree", min_length=1, least=0, most=MOST_NODES
    )
    rule: str = setting(help="acceptance rule")
    pair: str = setting(help="digest of the configs of verifier and drafter")

    def __post_init__(self) -> None:
        validate(self)
        expect(len(self.trees) <= MOST_TREES, "number of trees", len(self.trees), f"at most {MOST_TREES}")
        for trunk, branches, length in self.trees:
            tree = trunk, branches, length
            expect(branches and trunk + length, "tree", tree, "a branch at least, and a node besides the root")

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the largest tree, root included. Every round verifies this number of nodes."""
        return max(1 + trunk + branches * length for trunk, branches, length in self.trees)


def specs(config: TreeSelectorConfig) -> dict[str, Spec]:
    """Returns the specs of the weights: layers with WIDTHS outputs, then a layer with one score per tree."""
    weights: dict[str, Spec] = {}
    for layer, sizes in enumerate(pairwise((len(FEATURES), *WIDTHS, len(config.trees)))):
        weights |= {f"matrix_{layer}": Spec(sizes, (None, None)), f"bias_{layer}": Spec(sizes[1:], (None,), "zeros")}
    return weights


def score_trees(weights: Mapping[str, jax.Array], features_bf: jax.Array) -> jax.Array:
    """Returns the scores of all trees, float32 [b, a]. The tree with the highest score is chosen."""
    x_bd = features_bf @ weights["matrix_0"] + weights["bias_0"]
    for layer in range(1, 1 + len(WIDTHS)):
        x_bd = jax.nn.gelu(x_bd) @ weights[f"matrix_{layer}"] + weights[f"bias_{layer}"]
    return x_bd
