"""Heads of block drafters: they make a drafted token depend on the tokens before it (`block_head.Head`).

To add a head, write a file and add a line to HEADS; README.md in `drafters` has examples.
"""

from treeflash_jax.drafters.block.heads.block_head import Block, Head, Unembed
from treeflash_jax.drafters.block.heads.candidate_selector import CandidateSelectorHead
from treeflash_jax.drafters.block.heads.gru import GruHead
from treeflash_jax.drafters.block.heads.lilicorr import LiLiCorrHead
from treeflash_jax.drafters.block.heads.linear import LinearHead
from treeflash_jax.drafters.block.heads.lowrank import GatedLowRankHead, LowRankHead, RnnLowRankHead
from treeflash_jax.drafters.block.heads.marginal import MarginalHead
from treeflash_jax.drafters.block.heads.mlp import MlpHead

MARGINAL = "marginal"  # every block drafter can draft with it, because it has no weights
HEADS: dict[str, Head] = {
    MARGINAL: MarginalHead(),
    "mlp": MlpHead(),
    "linear": LinearHead(),
    "lowrank": LowRankHead(),
    "lowrank-gated": GatedLowRankHead(),
    "lowrank-rnn": RnnLowRankHead(),
    "gru": GruHead(),
    "selector": CandidateSelectorHead(),
    "lilicorr": LiLiCorrHead(),
}

__all__ = ["HEADS", "MARGINAL", "Block", "Head", "Unembed"]
