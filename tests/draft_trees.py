"""Paths of draft trees, and best-first and EAGLE-2's trees by their definitions.

Functions `children` map a path to (token, log-probability) pairs; none if the branch ends.
"""

import heapq
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from treeflash_jax.trees import BUILDERS, DraftTree, TreeInputs, TreeShape

Path = tuple[int, ...]


def grow(builder: str, expander: Any, anchor_b: Any, num_nodes: int, **shape: Any) -> DraftTree:
    """The tree of a deterministic builder."""
    return BUILDERS[builder].build(TreeInputs(expander, anchor_b, num_nodes, TreeShape(**shape)))[0]


def paths(built: DraftTree, b: int) -> list[Path]:
    """The token path of every node of one tree, in node order; fails if a parent does not precede its child."""
    tokens, parent, depth = (np.asarray(x)[b] for x in (built.tokens_bn, built.parent_bn, built.depth_bn))
    actual: list[Path] = [()]
    for node in range(1, int(np.asarray(built.valid_bn)[b].sum())):
        assert parent[node] < node
        actual.append((*actual[parent[node]], int(tokens[node])))
        assert depth[node] == len(actual[node])
    return actual


def best_first(children: Callable[[Path], Iterable], nodes: float = float("inf")) -> dict[Path, float]:
    """The likeliest paths with their log-probabilities, the root first: pops the best path and pushes its children."""
    popped: dict[Path, float] = {}
    heap: list[tuple[float, Path]] = [(np.float32(0), ())]
    while heap and len(popped) < nodes:
        cost, path = heapq.heappop(heap)
        popped[path] = -cost
        for token, log_p in children(path):
            heapq.heappush(heap, (cost - log_p, (*path, int(token))))
    return popped


def eagle_2(children: Callable[[Path], Iterable], depths: int, nodes: int, lanes: int) -> dict[Path, float]:
    """The published ledger: the best `lanes` nodes of a level offer children; all are kept until the end.

    A branch that ends keeps its lane.
    """
    ledger: dict[Path, float] = {}
    frontier: dict[Path, float] = {(): np.float32(0)}
    for _ in range(depths):
        offered = {(*path, int(x)): score + log_p for path, score in frontier.items() for x, log_p in children(path)}
        ledger |= offered
        frontier = dict(sorted(offered.items(), key=lambda item: -item[1])[:lanes])
    return dict(sorted(ledger.items(), key=lambda item: -item[1])[: nodes - 1])
