"""The TreeFlash head: a SwiGLU of (previous token's embedding, hidden state) added to the hidden state.

    h+ = h + W_d (silu(g) * u),   (u, g) = W_ug [RMSNorm(e); RMSNorm_final(h)] + b

W_ug is stored as two halves, for the token and for the hidden state: the latter is applied once per slot, not once per
context. With W_d = 0, as at the start of training, the head equals the marginal head.

Shape suffixes: b batch, q block slots, x contexts (slot, previous token), d model, f ffn, y = (u, g).

Source: TreeFlash (arXiv 2606.03819), AR approximation.
"""

from typing import Any, ClassVar

import jax

from treeflash_jax.core.parameters import Entry, Params, Spec
from treeflash_jax.drafters.block.heads.block_head import DrafterSizes
from treeflash_jax.drafters.block.heads.first_order import ByContext, FirstOrderHead
from treeflash_jax.models.layers import rms_norm
from treeflash_jax.models.quantized import product

NORM_EPS = 1e-6  # constant in the published code


class MlpHead(FirstOrderHead):
    file_name = "swiglu"
    entries: ClassVar[dict[str, Entry]] = {
        "norm": Entry("ar_approximation.norm.weight"),
        "token_ug": Entry("ar_approximation.ug.weight", order=(1, 2, 0), row_axes=2, part=(0, 2)),
        "hidden_ug": Entry("ar_approximation.ug.weight", order=(1, 2, 0), row_axes=2, part=(1, 2)),
        "bias": Entry("ar_approximation.ug.bias", order=(0, 1), row_axes=2),
        "down": Entry("ar_approximation.d.weight", order=(1, 0), row_axes=1),
    }

    def specs(self, drafter: DrafterSizes) -> dict[str, Any]:
        d, f = drafter.layers.hidden_size, drafter.layers.intermediate_size
        half = Spec((d, 2, f), ("embed", None, "ffn"), inputs=(0,), outputs=(1, 2))
        return {
            "norm": Spec((d,), (None,), "ones"),
            "token_ug": half,
            "hidden_ug": half,
            "bias": Spec((2, f), (None, "ffn"), "zeros"),
            "down": Spec((f, d), ("ffn", "embed"), "zeros", inputs=(0,), outputs=(1,)),
        }

    def correct(
        self, params: Params, embedding_bxd: jax.Array, by_context: ByContext, hidden_bqd: jax.Array, normed_bqd: jax.Array
    ) -> jax.Array:
        hidden_ug = by_context(product("bqd,dyf->bqyf", normed_bqd, params["hidden_ug"]))
        token_ug = product("bxd,dyf->bxyf", rms_norm(embedding_bxd, params["norm"], NORM_EPS), params["token_ug"])
        ug = token_ug + hidden_ug + params["bias"].astype(token_ug.dtype)
        return by_context(hidden_bqd) + product("bxf,fd->bxd", jax.nn.silu(ug[:, :, 1]) * ug[:, :, 0], params["down"])
