"""Sizes of a draft tree."""

from __future__ import annotations

from dataclasses import dataclass

MOST_NODES = 4096  # of a draft tree


@dataclass(frozen=True)
class Bucket:
    """Sizes of one delayed tree: a path of `trunk` draws, then `branches` i.i.d. paths of `length` from its end."""

    branches: int
    trunk: int
    length: int

    @property
    def nodes(self) -> int:
        """Root included."""
        return 1 + self.trunk + self.branches * self.length

    @property
    def depth(self) -> int:
        return self.trunk + self.length

    def cut(self, depths: int) -> Bucket:
        """The same tree of a drafter that drafts no deeper."""
        trunk = min(self.trunk, depths)
        return Bucket(self.branches, trunk, min(self.length, depths - trunk))


@dataclass(frozen=True, kw_only=True)
class TreeShape:
    """Sizes of a tree besides its number of nodes; static. Each builder reads its own.

    Attributes:
      branches: paths, or children per node at most.
      trunk: nodes drafted as one path before the branches (delayed expansion); "auto": as many as recent rounds kept; or
        buckets, one of which is chosen for every sequence and round, `branches` included.
      skeleton: share of the nodes, root not counted, that best-first search chooses (hybrid).
      lanes: nodes of a level whose children best-first search may take; None: all.
      leaves: whether tokens that end their branch may be drawn where the tree goes on below.
    """

    branches: int = 2
    trunk: int | str | tuple[Bucket, ...] = 2
    skeleton: float = 0.25
    leaves: bool = False
    lanes: int | None = None
