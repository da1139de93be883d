"""The head without weights: every depth drafts from its marginal. With a tree this is DDTree, with a chain DFlash.

Source: DFlash (arXiv 2602.06036), DDTree (arXiv 2604.12989).
"""

from typing import Any

import jax
import jax.numpy as jnp

from treeflash_jax.core.parameters import Entry
from treeflash_jax.drafters.block.block_config import DrafterConfig
from treeflash_jax.drafters.block.heads.table import DraftSettings, Unembed
from treeflash_jax.models import vocab
from treeflash_jax.trees import TransitionTable

READS_PREVIOUS = False
SECOND_PASS = False
LOOKED_UP = ()
FILE_NAME = None
ENTRIES: dict[str, Entry] = {}


def specs(config: DrafterConfig) -> dict[str, Any]:
    return {}


def logits(params: dict[str, Any], unembed: Unembed, previous_bm: jax.Array, hidden_bmd: jax.Array) -> jax.Array:
    """Returns next-token logits [b, m, v] of the block's marginals; see `heads`."""
    return vocab.unembed(unembed.unembed_vd, unembed.normed(hidden_bmd))


def expand(
    params: dict[str, Any], unembed: Unembed, hidden_bqd, anchor_b, settings: DraftSettings, temperature_b
) -> TransitionTable:
    """Returns the transition table [b, i, 1, c] of the block's marginals."""
    tokens_bic, log_probs_bic = unembed.likeliest(hidden_bqd[:, 1:], settings.children, temperature_b)
    next_context_bic = jnp.zeros_like(tokens_bic).at[:, -1].set(-1)
    return TransitionTable(tokens_bic[:, :, None], log_probs_bic[:, :, None], next_context_bic[:, :, None])
