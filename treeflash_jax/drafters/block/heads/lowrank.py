"""A bigram correction of low rank, added to the marginal logits:

    logits(v | previous token a) = marginal(v) + <W1[a], W2[v]>

Vectors of two tables are read instead of a second pass over the vocabulary: the candidates of a depth are the likeliest
tokens of its marginal. With W2 = 0 (how training starts) the head is the marginal one.

Shape suffixes: b batch, q block slots, i draft depth, m contexts (slot, previous token), x candidates of a depth, c
children kept, d model, k rank, v vocabulary.

Source: DSpark / DeepSpec, "vanilla" Markov head.
"""

from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from treeflash_jax.core.parameters import Entry, Spec
from treeflash_jax.drafters.block.heads.block_head import Head, Unembed, mass_elsewhere
from treeflash_jax.models import vocab
from treeflash_jax.models.backend import selection
from treeflash_jax.trees import TransitionTable


class LowRankHead(Head):
    file_name = "lowrank"
    entries: ClassVar[dict[str, Entry]] = {
        "previous": Entry("markov_head.markov_w1.weight", order=(0, 1)),
        "following": Entry("markov_head.markov_w2.weight", order=(0, 1)),
    }
    looked_up = ("previous", "following")

    def specs(self, drafter) -> dict[str, Any]:
        shape = drafter.layers.vocab_size, min(drafter.head_rank, drafter.layers.hidden_size)
        previous = Spec(shape, ("vocab", None), inputs=(1,))
        return {"previous": previous, "following": replace(previous, init="zeros")}

    def logits(self, params, unembed: Unembed, previous_bm, hidden_bmd) -> jax.Array:
        before_bmk = vocab.embed(params["previous"], previous_bm)
        marginal_bmv = vocab.unembed(unembed.unembed_vd, unembed.normed(hidden_bmd))
        return marginal_bmv + vocab.unembed(params["following"], before_bmk).astype(marginal_bmv.dtype)

    def expand(self, params, unembed: Unembed, hidden_bqd, anchor_b, drafter, temperature_b) -> TransitionTable:
        """Returns the transition table [b, i, m, c] of q(token | previous token).

        Children come from the likeliest marginal tokens of their depth; tokens off that list keep their marginal mass.
        """
        m, batch = drafter.candidates, anchor_b.shape[0]
        listed = max(m, drafter.children, drafter.shortlist)
        marginal_biv = vocab.unembed(unembed.unembed_vd, unembed.normed(hidden_bqd[:, 1:]))
        dtype = jnp.promote_types(marginal_biv.dtype, jnp.float32)
        likely_bix, ids_bix = vocab.top_k(marginal_biv, listed)
        tokens_bix = unembed.tokens(ids_bix)
        scale_b = temperature_b.astype(dtype)
        likely_bix = likely_bix.astype(dtype) / scale_b[:, None, None]
        elsewhere_bi = mass_elsewhere(marginal_biv, likely_bix, scale_b)

        anchor_b1m = jnp.broadcast_to(anchor_b[:, None, None], (batch, 1, m))
        previous_bim = jnp.concatenate([anchor_b1m, tokens_bix[:, :-1, :m]], axis=1)
        before_bimk, after_bixk = (
            vocab.embed(params["previous"], previous_bim),
            vocab.embed(params["following"], tokens_bix),
        )
        change_bimx = jnp.einsum("bimk,bixk->bimx", before_bimk, after_bixk, preferred_element_type=dtype)
        scores_bimx = likely_bix[:, :, None] + change_bimx / scale_b[:, None, None, None]
        total_bim = jnp.logaddexp(jax.nn.logsumexp(scores_bimx, axis=-1), elsewhere_bi[..., None])
        values_bimc, at_bimc = selection.top_k(scores_bimx, drafter.children)
        children_bimc = jnp.take_along_axis(tokens_bix[:, :, None], at_bimc, axis=-1)
        is_last_i111 = (jnp.arange(tokens_bix.shape[1]) == tokens_bix.shape[1] - 1)[:, None, None]
        next_context_bimc = jnp.where((at_bimc < m) & ~is_last_i111, at_bimc, -1).astype(jnp.int32)
        return TransitionTable(children_bimc, jnp.minimum(values_bimc - total_bim[..., None], 0), next_context_bimc)
