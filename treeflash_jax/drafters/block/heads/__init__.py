"""Heads: what turns the drafter's block into the transition table a tree is built from.

A head is one file with `specs(config)` (its weights) and `expand(...)`, and one line in HEADS.
"""

from __future__ import annotations

from treeflash_jax.drafters.block.heads import linear, marginal, mlp
from treeflash_jax.drafters.block.heads.table import DraftSettings, Unembed

HEADS = {"marginal": marginal, "mlp": mlp, "linear": linear}

__all__ = ["HEADS", "DraftSettings", "Unembed"]
