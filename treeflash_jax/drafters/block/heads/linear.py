"""The paper's ablation of the TreeFlash head: one linear map in place of the SwiGLU.

    h+ = h + W [RMSNorm(e); RMSNorm_final(h)]

Shape suffixes: b batch, q block slots, r rows (slot, previous token), d model.

Source: TreeFlash (arXiv 2606.03819), ablations.
"""

from __future__ import annotations

from typing import Any

import jax

from treeflash_jax.drafters.block.config import DrafterConfig
from treeflash_jax.drafters.block.heads.mlp import NORM_EPS
from treeflash_jax.drafters.block.heads.table import ByRow, first_order
from treeflash_jax.params import Entry, Spec
from treeflash_jax.verifiers.layers import linear, rms_norm

SECOND_PASS = True
LOOKED_UP = ()
FILE_NAME = "linear"
ENTRIES = {
    "norm": Entry("ar_approximation.norm.weight"),
    "token": Entry("ar_approximation.linear.weight", order=(1, 0), rows=1, part=(0, 2)),
    "hidden": Entry("ar_approximation.linear.weight", order=(1, 0), rows=1, part=(1, 2)),
}


def specs(config: DrafterConfig) -> dict[str, Any]:
    d = config.layers.hidden_size
    return {
        "norm": Spec((d,), (None,), "ones"),
        "token": Spec((d, d), ("embed", None), "zeros", inputs=(0,), outputs=(1,)),
        "hidden": Spec((d, d), ("embed", None), "zeros", inputs=(0,), outputs=(1,)),
    }


def correct(
    params: dict[str, Any],
    embedding_brd: jax.Array,
    by_row: ByRow,
    hidden_bqd: jax.Array,
    normed_bqd: jax.Array,
) -> jax.Array:
    """h + W [RMSNorm(e); RMSNorm_final(h)] of every row, [b, r, d]; arguments as for the MLP head."""
    by_slot_bqd = hidden_bqd + linear("bqd,de->bqe", normed_bqd, params["hidden"])
    normed_brd = rms_norm(embedding_brd, params["norm"], NORM_EPS)
    return by_row(by_slot_bqd) + linear("brd,de->bre", normed_brd, params["token"])


logits, expand = first_order(correct)
