"""No head: every depth drafts from its marginal. With a tree this is DDTree, with a chain DFlash.

Source: DFlash (arXiv 2602.06036), DDTree (arXiv 2604.12989).
"""

from __future__ import annotations

from typing import Any

import jax

from treeflash_jax import vocab
from treeflash_jax.drafters.block.config import DrafterConfig
from treeflash_jax.drafters.block.heads.table import DraftSettings, Unembed, marginal_table
from treeflash_jax.params import Entry
from treeflash_jax.trees import TransitionTable

SECOND_PASS = False
LOOKED_UP = ()
FILE_NAME = None
ENTRIES: dict[str, Entry] = {}


def specs(config: DrafterConfig) -> dict[str, Any]:
    return {}


def logits(params: dict[str, Any], unembed: Unembed, previous_br: jax.Array, hidden_brd: jax.Array) -> jax.Array:
    """Next-token logits [b, r, v] of the block's marginals; see `heads`."""
    return vocab.unembed(unembed.unembed_vd, unembed.normed(hidden_brd))


def expand(
    params: dict[str, Any],
    unembed: Unembed,
    hidden_bqd: jax.Array,
    anchor_b: jax.Array,
    settings: DraftSettings,
    temperature_b: jax.Array,
) -> TransitionTable:
    """Transition table [b, i, 1, c] of the block's marginals."""
    return marginal_table(unembed, hidden_bqd, settings, temperature_b)
