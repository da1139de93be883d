"""The head of DFlash2, its candidate selector: pairwise scores of adjacent candidates, added to the marginal logits.

    logits(v | previous token a) = marginal(v) + <A[a] * P z, B[v]>

Only the `top_k` likeliest tokens of a depth are candidates. In trees, their total mass is what they have in the marginal. z
is the slot's hidden state after the final norm. With B = 0, the head equals the marginal head.

Shape suffixes: b batch, m contexts (slot, previous token), d model, v vocabulary, k likeliest tokens.

Source: DFlash2, as in NeMo AutoModel and vLLM's speculators.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from treeflash_jax.core.parameters import Entry, Params, Spec
from treeflash_jax.drafters.block.heads.block_head import DrafterSizes, Unembed, head_rank
from treeflash_jax.drafters.block.heads.lowrank import LowRankHead, table_specs
from treeflash_jax.models import vocab
from treeflash_jax.models.quantized import product


@dataclass(frozen=True)
class CandidateSelectorSizes:
    """Sizes of the head: the number of candidates per depth."""

    top_k: int = 16


class CandidateSelectorHead(LowRankHead):
    file_name = "selector"
    entries: ClassVar[dict[str, Entry]] = {
        "previous": Entry("candidate_selector.predecessor_codebook", order=(0, 1)),
        "following": Entry("candidate_selector.successor_codebook", order=(0, 1)),
        "hidden": Entry("candidate_selector.hidden_projection.weight", order=(1, 0)),
    }

    trains_candidates = True

    def sizes(self, drafter: DrafterSizes) -> CandidateSelectorSizes:
        return drafter.head_sizes or CandidateSelectorSizes()

    def specs(self, drafter: DrafterSizes) -> dict[str, Any]:
        hidden = Spec((drafter.layers.hidden_size, head_rank(drafter)), (None, None), inputs=(0,), outputs=(1,))
        return table_specs(drafter) | {"hidden": hidden}

    def vectors(self, params: Params, before: jax.Array, normed: jax.Array) -> jax.Array:
        return before * product("...d,dk->...k", normed, params["hidden"])

    def logits(
        self, params: Params, unembed: Unembed, previous_bm: jax.Array, hidden_bmd: jax.Array, drafter: DrafterSizes
    ) -> jax.Array:
        marginal_bmv = lax.stop_gradient(unembed.logits(unembed.normed(hidden_bmd)))
        likely_bmk, _ = vocab.top_k(marginal_bmv, self.sizes(drafter).top_k)
        corrected_bmv = super().logits(params, unembed, previous_bm, hidden_bmd, drafter)
        return jnp.where(marginal_bmv >= likely_bmk[..., -1:], corrected_bmv, -jnp.inf)

    def count_listed(self, drafter: DrafterSizes) -> int:
        return min(super().count_listed(drafter), self.sizes(drafter).top_k)
