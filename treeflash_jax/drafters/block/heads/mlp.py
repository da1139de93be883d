"""The TreeFlash head: a SwiGLU of (previous token's embedding, hidden state) added to the hidden state.

    h+ = h + W_d (silu(g) * u),   (u, g) = W_ug [RMSNorm(e); RMSNorm_final(h)] + b

W_ug is kept as its token and hidden halves: the hidden half is computed once a slot, not once a (slot, previous token).
With W_d = 0 (how training starts) the head is the marginal one.

Shape suffixes: b batch, q block slots, r rows (slot, previous token), d model, f ffn, x = (u, g).

Source: TreeFlash (arXiv 2606.03819), AR approximation.
"""

from __future__ import annotations

from typing import Any

import jax

from treeflash_jax.drafters.block.config import DrafterConfig
from treeflash_jax.drafters.block.heads.table import ByRow, first_order
from treeflash_jax.params import Entry, Spec
from treeflash_jax.verifiers.layers import linear, rms_norm

SECOND_PASS = True
LOOKED_UP = ()
FILE_NAME = "swiglu"  # `ar_approximation` in config.json
ENTRIES = {
    "norm": Entry("ar_approximation.norm.weight"),
    "token_ug": Entry("ar_approximation.ug.weight", order=(1, 2, 0), rows=2, part=(0, 2)),
    "hidden_ug": Entry("ar_approximation.ug.weight", order=(1, 2, 0), rows=2, part=(1, 2)),
    "bias": Entry("ar_approximation.ug.bias", order=(0, 1), rows=2),
    "down": Entry("ar_approximation.d.weight", order=(1, 0), rows=1),
}
NORM_EPS = 1e-6  # fixed in the published code, whatever the config says


def specs(config: DrafterConfig) -> dict[str, Any]:
    d, f = config.layers.hidden_size, config.layers.intermediate_size
    return {
        "norm": Spec((d,), (None,), "ones"),
        "token_ug": Spec((d, 2, f), ("embed", None, "ffn"), inputs=(0,), outputs=(1, 2)),
        "hidden_ug": Spec((d, 2, f), ("embed", None, "ffn"), inputs=(0,), outputs=(1, 2)),
        "bias": Spec((2, f), (None, "ffn"), "zeros"),
        "down": Spec((f, d), ("ffn", "embed"), "zeros", inputs=(0,), outputs=(1,)),
    }


def correct(
    params: dict[str, Any],
    embedding_brd: jax.Array,
    by_row: ByRow,
    hidden_bqd: jax.Array,
    normed_bqd: jax.Array,
) -> jax.Array:
    """h + W_d (silu(g) * u) of every row, [b, r, d].

    Args:
      embedding_brd: of the previous tokens.
      by_row: what each row's slot has, [b, r, ...], of what slots have, [b, q, ...].
      hidden_bqd: un-normed hidden states of the slots.
      normed_bqd: after the drafter's final norm.
    """
    hidden_ug = by_row(linear("bqd,dxf->bqxf", normed_bqd, params["hidden_ug"]))
    token_ug = linear("brd,dxf->brxf", rms_norm(embedding_brd, params["norm"], NORM_EPS), params["token_ug"])
    ug = token_ug + hidden_ug + params["bias"].astype(token_ug.dtype)
    return by_row(hidden_bqd) + linear("brf,fd->brd", jax.nn.silu(ug[:, :, 1]) * ug[:, :, 0], params["down"])


logits, expand = first_order(correct)
