"""The linear head, the paper's ablation of the TreeFlash head: a linear map instead of the SwiGLU.

    h+ = h + W [RMSNorm(e); RMSNorm_final(h)]

Shape suffixes: b batch, q block slots, x contexts (slot, previous token), d model.

Source: TreeFlash (arXiv 2606.03819), ablations.
"""

from typing import Any, ClassVar

import jax

from treeflash_jax.core.parameters import Entry, Params, Spec
from treeflash_jax.drafters.block.heads.block_head import DrafterSizes
from treeflash_jax.drafters.block.heads.first_order import ByContext, FirstOrderHead
from treeflash_jax.drafters.block.heads.mlp import NORM_EPS
from treeflash_jax.models.layers import rms_norm
from treeflash_jax.models.quantized import product


class LinearHead(FirstOrderHead):
    file_name = "linear"
    entries: ClassVar[dict[str, Entry]] = {
        "norm": Entry("ar_approximation.norm.weight"),
        "token": Entry("ar_approximation.linear.weight", order=(1, 0), row_axes=1, part=(0, 2)),
        "hidden": Entry("ar_approximation.linear.weight", order=(1, 0), row_axes=1, part=(1, 2)),
    }

    def specs(self, drafter: DrafterSizes) -> dict[str, Any]:
        d = drafter.layers.hidden_size
        half = Spec((d, d), ("embed", None), "zeros", inputs=(0,), outputs=(1,))
        return {"norm": Spec((d,), (None,), "ones"), "token": half, "hidden": half}

    def correct(
        self, params: Params, embedding_bxd: jax.Array, by_context: ByContext, hidden_bqd: jax.Array, normed_bqd: jax.Array
    ) -> jax.Array:
        by_slot_bqd = hidden_bqd + product("bqd,de->bqe", normed_bqd, params["hidden"])
        normed_bxd = rms_norm(embedding_bxd, params["norm"], NORM_EPS)
        return by_context(by_slot_bqd) + product("bxd,de->bxe", normed_bxd, params["token"])
