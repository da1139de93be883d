"""The TreeFlash head: a SwiGLU of (previous token's embedding, hidden state) added to the hidden state.

    h+ = h + W_d (silu(g) * u),   (u, g) = W_ug [RMSNorm(e); RMSNorm_final(h)] + b

W_ug is kept as its token and hidden halves: the hidden half is computed once per slot, not once per context.
With W_d = 0 (how training starts) the head is the marginal one.

Shape suffixes: b batch, q block slots, m contexts (slot, previous token), d model, f ffn, x = (u, g).

Source: TreeFlash (arXiv 2606.03819), AR approximation.
"""

from typing import Any

import jax

from treeflash_jax.core.parameters import Entry, Spec
from treeflash_jax.drafters.block.block_config import DrafterConfig
from treeflash_jax.drafters.block.heads.table import ByContext, first_order
from treeflash_jax.models.layers import rms_norm
from treeflash_jax.models.quantized import product

READS_PREVIOUS = True
SECOND_PASS = True
LOOKED_UP = ()
FILE_NAME = "swiglu"  # `ar_approximation` in config.json
ENTRIES = {
    "norm": Entry("ar_approximation.norm.weight"),
    "token_ug": Entry("ar_approximation.ug.weight", order=(1, 2, 0), row_axes=2, part=(0, 2)),
    "hidden_ug": Entry("ar_approximation.ug.weight", order=(1, 2, 0), row_axes=2, part=(1, 2)),
    "bias": Entry("ar_approximation.ug.bias", order=(0, 1), row_axes=2),
    "down": Entry("ar_approximation.d.weight", order=(1, 0), row_axes=1),
}
NORM_EPS = 1e-6  # fixed in the published code, independent of the config


def specs(config: DrafterConfig) -> dict[str, Any]:
    d, f = config.layers.hidden_size, config.layers.intermediate_size
    return {
        "norm": Spec((d,), (None,), "ones"),
        "token_ug": Spec((d, 2, f), ("embed", None, "ffn"), inputs=(0,), outputs=(1, 2)),
        "hidden_ug": Spec((d, 2, f), ("embed", None, "ffn"), inputs=(0,), outputs=(1, 2), once_per_slot=True),
        "bias": Spec((2, f), (None, "ffn"), "zeros"),
        "down": Spec((f, d), ("ffn", "embed"), "zeros", inputs=(0,), outputs=(1,)),
    }


def correct(
    params: dict[str, Any], embedding_bmd: jax.Array, by_context: ByContext, hidden_bqd: jax.Array, normed_bqd: jax.Array
) -> jax.Array:
    """Returns h + W_d (silu(g) * u) in every context, [b, m, d].

    Args:
      embedding_bmd: embeddings of the previous tokens.
      by_context: maps values of slots [b, q, ...] to the values of each context's slot [b, m, ...].
      hidden_bqd: hidden states of the slots.
      normed_bqd: hidden states after the drafter's final norm.
    """
    hidden_ug = by_context(product("bqd,dxf->bqxf", normed_bqd, params["hidden_ug"]))
    token_ug = product("bmd,dxf->bmxf", rms_norm(embedding_bmd, params["norm"], NORM_EPS), params["token_ug"])
    ug = token_ug + hidden_ug + params["bias"].astype(token_ug.dtype)
    return by_context(hidden_bqd) + product("bmf,fd->bmd", jax.nn.silu(ug[:, :, 1]) * ug[:, :, 0], params["down"])


logits, expand = first_order(correct)
