"""Heads of block drafters: they condition a drafted token on tokens before it (`block_head.Head`).

A head is one file with one line in HEADS; README.md in `drafters` has examples.
"""

from treeflash_jax.drafters.block.heads.block_head import Block, Head, Unembed
from treeflash_jax.drafters.block.heads.gru import GruHead
from treeflash_jax.drafters.block.heads.lilicorr import LiLiCorrHead
from treeflash_jax.drafters.block.heads.linear import LinearHead
from treeflash_jax.drafters.block.heads.lowrank import GatedLowRankHead, LowRankHead, RnnLowRankHead
from treeflash_jax.drafters.block.heads.marginal import MarginalHead
from treeflash_jax.drafters.block.heads.mlp import MlpHead
from treeflash_jax.drafters.block.heads.selector_head import SelectorHead

MARGINAL = "marginal"  # has no weights: every block drafter can draft with it
HEADS: dict[str, Head] = {
    MARGINAL: MarginalHead(),
    "mlp": MlpHead(),
    "linear": LinearHead(),
    "lowrank": LowRankHead(),
    "lowrank-gated": GatedLowRankHead(),
    "lowrank-rnn": RnnLowRankHead(),
    "gru": GruHead(),
    "selector": SelectorHead(),
    "lilicorr": LiLiCorrHead(),
}

__all__ = ["HEADS", "MARGINAL", "Block", "Head", "Unembed"]
