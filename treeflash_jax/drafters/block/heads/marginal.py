"""The head without weights: every depth drafts from its marginal. With a tree this is DDTree, with a chain DFlash.

Shape suffixes: b batch, i draft depth, m contexts (slot, previous token), c children kept, d model.

Source: DFlash (arXiv 2602.06036), DDTree (arXiv 2604.12989).
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from treeflash_jax.core.parameters import Entry, Params
from treeflash_jax.drafters.block.heads.block_head import Block, DrafterSizes, Head, Unembed
from treeflash_jax.trees import TransitionTable


class MarginalHead(Head):
    file_name = None
    entries: ClassVar[dict[str, Entry]] = {}

    def specs(self, drafter: DrafterSizes) -> dict[str, Any]:
        return {}

    def expand(self, params: Params, unembed: Unembed, block: Block, drafter: DrafterSizes) -> TransitionTable:
        """Returns the transition table [b, i, 1, c] of the block's marginals."""
        tokens_bic, log_probs_bic = unembed.likeliest(block.hidden_bid, drafter.children, block.temperature_b)
        next_context_bic = jnp.zeros_like(tokens_bic).at[:, -1].set(-1)
        return TransitionTable(tokens_bic[:, :, None], log_probs_bic[:, :, None], next_context_bic[:, :, None])

    def logits(
        self, params: Params, unembed: Unembed, previous_bm: jax.Array, hidden_bmd: jax.Array, drafter: DrafterSizes
    ) -> jax.Array:
        return unembed.logits(unembed.normed(hidden_bmd))
