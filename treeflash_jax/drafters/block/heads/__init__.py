"""Heads of block drafters: they condition a drafted token on the token before it (`block_head.Head`).

A head is one file with one line in HEADS.
"""

from treeflash_jax.drafters.block.heads.block_head import Head, Unembed
from treeflash_jax.drafters.block.heads.linear import LinearHead
from treeflash_jax.drafters.block.heads.lowrank import LowRankHead
from treeflash_jax.drafters.block.heads.marginal import MarginalHead
from treeflash_jax.drafters.block.heads.mlp import MlpHead

MARGINAL = "marginal"  # has no weights: every block drafter can draft with it
HEADS: dict[str, Head] = {MARGINAL: MarginalHead(), "mlp": MlpHead(), "linear": LinearHead(), "lowrank": LowRankHead()}

__all__ = ["HEADS", "MARGINAL", "Head", "Unembed"]
