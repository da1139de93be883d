"""Sizes of a draft tree."""

from __future__ import annotations

from dataclasses import dataclass

MOST_NODES = 4096  # of a draft tree


@dataclass(frozen=True, kw_only=True)
class TreeShape:
    """Sizes of a tree besides its number of nodes; static. Each builder reads its own.

    Attributes:
      branches: paths, or children per node at most.
      trunk: nodes drafted as one path before the branches (delayed expansion); "auto": as many as recent rounds kept.
      skeleton: share of the nodes, root not counted, that best-first search chooses (hybrid).
      lanes: nodes of a level whose children best-first search may take; None: all.
      leaves: whether tokens that end their branch may be drawn where the tree goes on below.
    """

    branches: int = 2
    trunk: int | str = 2
    skeleton: float = 0.25
    leaves: bool = False
    lanes: int | None = None
