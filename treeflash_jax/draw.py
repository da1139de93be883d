"""Draft trees as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from treeflash_jax.tree import DraftTree


@dataclass(frozen=True, kw_only=True)
class DrawnTree:
    """A draft tree as text.

    Attributes:
      labels: one per node, the anchor first.
      parents: index of each node's parent; 0 for the anchor.
      probabilities: of each path from the anchor, as drafted.
      accepted: whether the verifier kept the node.
      bonus: label of the token the verifier added.
    """

    labels: Sequence[str]
    parents: Sequence[int]
    probabilities: Sequence[float]
    accepted: Sequence[bool]
    bonus: str

    def __str__(self) -> str:
        children: dict[int, list[int]] = {}
        for node in range(1, len(self.labels)):
            children.setdefault(self.parents[node], []).append(node)
        lines = [f"{self.labels[0]}   (anchor; {len(self.labels)} rows, accepted nodes marked ●, then {self.bonus})"]

        def draw(node: int, indent: str) -> None:
            below = children.get(node, [])
            for i, child in enumerate(below):
                last = i == len(below) - 1
                mark = "●" if self.accepted[child] else " "
                branch = "└─" if last else "├─"
                lines.append(f"{indent}{branch}{mark} {self.labels[child]}  {self.probabilities[child]:.2f}")
                draw(child, indent + ("   " if last else "│  "))

        draw(0, "")
        return "\n".join(lines)


def drawn_tree(tree: DraftTree, following: Sequence[int], accepted: int, label: Callable[[int], str]) -> DrawnTree:
    """The first tree of a batch, with the path that was accepted in it.

    Args:
      tree: as drafted.
      following: tokens emitted after the anchor, possibly cut before the round's end.
      accepted: tokens the round committed, bonus included.
      label: of a token id.
    """
    tokens, parents, log_probs, valid = (
        np.asarray(x)[0] for x in (tree.tokens_bn, tree.parent_bn, tree.log_prob_bn, tree.valid_bn)
    )
    count = int(valid.sum())
    path = [0]
    for token in following[: accepted - 1]:
        path += [n for n in range(1, count) if parents[n] == path[-1] and tokens[n] == token]
    bonus = f"bonus {label(following[accepted - 1])}" if len(following) >= accepted else "the cut"
    return DrawnTree(
        labels=[label(int(token)) for token in tokens[:count]],
        parents=parents[:count].tolist(),
        probabilities=np.exp(log_probs[:count]).tolist(),
        accepted=[node in path for node in range(count)],
        bonus=bonus,
    )
