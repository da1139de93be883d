"""Draft trees as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from treeflash_jax.trees import DraftTree


@dataclass(frozen=True, kw_only=True)
class DrawnTree:
    """A draft tree as text.

    Attributes:
      labels: text of each node's token, the anchor first.
      parents: index of each node's parent; 0 for the anchor.
      probabilities: drafted probability of the path from the anchor to each node.
      accepted: true for nodes that the verifier kept.
      bonus: text of the bonus token.
    """

    labels: Sequence[str]
    parents: Sequence[int]
    probabilities: Sequence[float]
    accepted: Sequence[bool]
    bonus: str

    def __str__(self) -> str:
        return "\n".join(f"{indent}{self._label(node)}" for node, indent in self._lines())

    def _repr_html_(self) -> str:
        """Shows the same text in notebooks, with accepted nodes in green."""
        lines = []
        for node, indent in self._lines():
            label = escape(self._label(node))
            lines.append(escape(indent) + (f'<b style="color: #1a7f37">{label}</b>' if self.accepted[node] else label))
        return '<pre style="line-height: 1.2">' + "\n".join(lines) + "</pre>"

    def _lines(self) -> Iterator[tuple[int, str]]:
        """Yields the nodes from top to bottom, with the branches drawn before each."""
        children: dict[int, list[int]] = {}
        for node in range(1, len(self.labels)):
            children.setdefault(self.parents[node], []).append(node)

        def below(node: int, indent: str) -> Iterator[tuple[int, str]]:
            for child in children.get(node, []):
                last = child == children[node][-1]
                yield child, indent + ("└─" if last else "├─")
                yield from below(child, indent + ("   " if last else "│  "))

        yield 0, ""
        yield from below(0, "")

    def _label(self, node: int) -> str:
        if node == 0:
            return f"{self.labels[0]}   (anchor; {len(self.labels)} nodes, accepted nodes marked ●, then {self.bonus})"
        return f"{'●' if self.accepted[node] else ' '} {self.labels[node]}  {self.probabilities[node]:.2f}"


def drawn_tree(tree: DraftTree, following: Sequence[int], accepted: int, label: Callable[[int], str]) -> DrawnTree:
    """Draws the first tree of a batch with the path that was accepted in it.

    Args:
      following: tokens after the anchor; fewer than `accepted` if the answer was cut within the round.
      accepted: number of tokens that the round committed, bonus included.
      label: token id -> text.
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
