"""Options that several kinds of drafters share. A drafter's module names its own dataclass of options as OPTIONS.

Every option of a registered drafter is a setting of `generate`, a command-line option, and part of the records.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from treeflash_jax.core.checks import bounded
from treeflash_jax.trees.shape import MAX_NODES

option = partial(bounded, kind="speed")  # no option of a drafter changes the distribution of the output


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """Options of drafters that list the most likely next tokens of every node."""

    children: int = option(16, "most likely next tokens kept for every candidate (K in the paper)", least=1, unit="tokens")


@dataclass(frozen=True, kw_only=True)
class LevelOptions(ListOptions):
    """Options of drafters that draft one level of the tree after the other."""

    depths: int | None = option(
        None,
        "deepest level of the tree, or length of the chain, for drafters whose network runs once per level",
        unset="the drafter's",
        least=1,
        most=MAX_NODES - 1,
        unit="levels",
    )
