"""The paper's ablation of the TreeFlash head: one linear map instead of the SwiGLU.

    h+ = h + W [RMSNorm(e); RMSNorm_final(h)]

Shape suffixes: b batch, q block slots, m contexts (slot, previous token), d model.

Source: TreeFlash (arXiv 2606.03819), ablations.
"""

from typing import Any

import jax

from treeflash_jax.core.parameters import Entry, Spec
from treeflash_jax.drafters.block.block_config import DrafterConfig
from treeflash_jax.drafters.block.heads.mlp import NORM_EPS
from treeflash_jax.drafters.block.heads.table import ByContext, first_order
from treeflash_jax.models.layers import rms_norm
from treeflash_jax.models.quantized import product

READS_PREVIOUS = True
SECOND_PASS = True
LOOKED_UP = ()
FILE_NAME = "linear"
ENTRIES = {
    "norm": Entry("ar_approximation.norm.weight"),
    "token": Entry("ar_approximation.linear.weight", order=(1, 0), row_axes=1, part=(0, 2)),
    "hidden": Entry("ar_approximation.linear.weight", order=(1, 0), row_axes=1, part=(1, 2)),
}


def specs(config: DrafterConfig) -> dict[str, Any]:
    d = config.layers.hidden_size
    return {
        "norm": Spec((d,), (None,), "ones"),
        "token": Spec((d, d), ("embed", None), "zeros", inputs=(0,), outputs=(1,)),
        "hidden": Spec((d, d), ("embed", None), "zeros", inputs=(0,), outputs=(1,), once_per_slot=True),
    }


def correct(
    params: dict[str, Any], embedding_bmd: jax.Array, by_context: ByContext, hidden_bqd: jax.Array, normed_bqd: jax.Array
) -> jax.Array:
    """Returns h + W [RMSNorm(e); RMSNorm_final(h)] in every context, [b, m, d]; arguments as for the MLP head."""
    by_slot_bqd = hidden_bqd + product("bqd,de->bqe", normed_bqd, params["hidden"])
    normed_bmd = rms_norm(embedding_bmd, params["norm"], NORM_EPS)
    return by_context(by_slot_bqd) + product("bmd,de->bme", normed_bmd, params["token"])


logits, expand = first_order(correct)
