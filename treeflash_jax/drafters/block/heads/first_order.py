"""The two-stage approximation of first-order heads: candidates from the marginals, then all transitions at once.

Shape suffixes: b batch, i draft depth, q the slots that predict them, m previous tokens of a depth, x = 1 + (i - 1) m
contexts of the second stage (slot, previous token), c children kept, d model, v vocabulary, y likeliest tokens of a
depth, z shortlisted tokens.

Source: TreeFlash (arXiv 2606.03819), two-stage approximation.
"""

from abc import abstractmethod
from collections.abc import Callable

import jax
import jax.numpy as jnp

from treeflash_jax.core.dtypes import at_least_float32
from treeflash_jax.core.parameters import Params
from treeflash_jax.drafters.block.heads.block_head import Block, DrafterSizes, Head, Unembed, mass_elsewhere
from treeflash_jax.models import vocab
from treeflash_jax.models.backend import indexing, selection
from treeflash_jax.trees import TransitionTable

ByContext = Callable[[jax.Array], jax.Array]  # values of slots [b, q, ...] -> values of each context's slot [b, x, ...]


class FirstOrderHead(Head):
    """A head that corrects the hidden state of a slot, given the previous token."""

    @abstractmethod
    def correct(
        self,
        params: Params,
        embedding_bxd: jax.Array,
        by_context: ByContext,
        hidden_bqd: jax.Array,
        normed_bqd: jax.Array,
    ) -> jax.Array:
        """Returns the corrected hidden state in every context, [b, x, d].

        Args:
          embedding_bxd: embeddings of the previous tokens.
          by_context: function that maps values of slots [b, q, ...] to values for the slot of each context [b, x, ...].
          hidden_bqd: hidden states of the slots.
          normed_bqd: hidden states after the drafter's final norm.
        """

    def logits(
        self, params: Params, unembed: Unembed, previous_bx: jax.Array, hidden_bxd: jax.Array, drafter: DrafterSizes
    ) -> jax.Array:
        embedding_bxd, normed_bxd = unembed.embed(previous_bx), unembed.normed(hidden_bxd)
        corrected_bxd = self.correct(params, embedding_bxd, lambda slots: slots, hidden_bxd, normed_bxd)
        return unembed.logits(unembed.normed(corrected_bxd))

    def expand(self, params: Params, unembed: Unembed, block: Block, drafter: DrafterSizes) -> TransitionTable:
        """Returns the table of all contexts (depth i, previous token m) from one batched pass of `correct`.

        Stage one: the M likeliest marginal tokens of each slot are the previous tokens of the next depth. Depth 0 has only
        the anchor. Stage two: corrected hidden states, logits and the K likeliest tokens, for all 1 + (depths - 1) M
        contexts at once. If a child's token is not a candidate of its depth, it has no context to continue with, and its
        branch ends.

        With a shortlist, stage two reads only the shortlisted tokens of the vocabulary table instead of reading all of it
        again. A token off the list is then never drafted. The output stays exact, but fewer tokens may be accepted.
        """
        hidden_bqd, temperature_b = block.hidden_bid, block.temperature_b
        batch, depths, _ = hidden_bqd.shape
        m, normed_bqd = drafter.candidates, unembed.normed(hidden_bqd)
        marginal_biv = unembed.logits(normed_bqd[:, : depths if drafter.shortlist else depths - 1])
        likely_biy = jnp.zeros((batch, 0, m), jnp.int32)
        if marginal_biv.shape[1]:
            _, likely_biy = vocab.top_k(marginal_biv, max(m, drafter.shortlist))
        candidates_bim = unembed.tokens(likely_biy[:, : depths - 1, :m])
        previous_bx = jnp.concatenate([block.anchor_b[:, None], candidates_bim.reshape(batch, -1)], axis=1)
        by_context = indexing.slot_repeater(depths, m)
        corrected_bxd = self.correct(params, unembed.embed(previous_bx), by_context, hidden_bqd, normed_bqd)
        if drafter.shortlist:
            listed_biy = likely_biy[..., : drafter.shortlist]
            tokens_bxc, log_probs_bxc = _shortlisted(
                unembed, corrected_bxd, by_context, marginal_biv, listed_biy, temperature_b, drafter.children
            )
        else:
            tokens_bxc, log_probs_bxc = unembed.likeliest(corrected_bxd, drafter.children, temperature_b)

        def table(values_bxc: jax.Array) -> jax.Array:
            """Returns [b, i, m, c] from [b, x, c], with the single context of depth 0 repeated m times."""
            first = jnp.broadcast_to(values_bxc[:, :1], (batch, m, values_bxc.shape[2]))
            return jnp.concatenate([first, values_bxc[:, 1:]], axis=1).reshape(batch, depths, m, -1)

        tokens_bimc = table(tokens_bxc)
        same_bimcm = tokens_bimc[:, :-1, :, :, None] == candidates_bim[:, :, None, None, :]
        context_bimc = jnp.where(same_bimcm.any(-1), jnp.argmax(same_bimcm, axis=-1), -1).astype(jnp.int32)
        leaves_bimc = jnp.full_like(tokens_bimc[:, -1:], -1)
        return TransitionTable(tokens_bimc, table(log_probs_bxc), jnp.concatenate([context_bimc, leaves_bimc], axis=1))


def _shortlisted(
    unembed: Unembed,
    corrected_bxd: jax.Array,
    by_context: ByContext,
    marginal_biv: jax.Array,
    likely_biy: jax.Array,
    temperature_b: jax.Array,
    children: int,
) -> tuple[jax.Array, jax.Array]:
    """Returns `vocab.top_log_probs` in every context, among the tokens that are likely at any depth, [b, x, c] each.

    For normalisation, tokens off the list get the mass that they have in the marginal of the depth.
    """
    batch = likely_biy.shape[0]
    tokens_bz = likely_biy.reshape(batch, -1)
    earlier_zz = jnp.tri(tokens_bz.shape[1], k=-1, dtype=bool)
    again_bz = jnp.any((tokens_bz[:, :, None] == tokens_bz[:, None]) & earlier_zz, axis=-1)
    dtype = at_least_float32(corrected_bxd.dtype)
    temperature_b11 = temperature_b[:, None, None].astype(dtype)

    def scaled(logits: jax.Array) -> jax.Array:
        return jnp.where(again_bz[:, None], -jnp.inf, logits.astype(dtype) / temperature_b11)

    vectors_bzd = vocab.embed(unembed.unembed_vd, tokens_bz)
    logits_bxz = jnp.einsum("bxd,bzd->bxz", unembed.normed(corrected_bxd), vectors_bzd, preferred_element_type=dtype)
    scores_bxz = scaled(vocab.cap(logits_bxz, unembed.logit_cap))
    tokens_biz = jnp.broadcast_to(tokens_bz[:, None], (*marginal_biv.shape[:2], tokens_bz.shape[1]))
    listed_biz = scaled(vocab.take(marginal_biv, tokens_biz))
    elsewhere_bi = mass_elsewhere(marginal_biv, listed_biz, temperature_b)
    total_bx = jnp.logaddexp(jax.nn.logsumexp(scores_bxz, axis=-1), by_context(elsewhere_bi))
    values_bxc, at_bxc = selection.top_k(scores_bxz, min(children, scores_bxz.shape[-1]))
    tokens_bxc = unembed.tokens(jnp.take_along_axis(tokens_bz[:, None], at_bxc, axis=-1))
    return tokens_bxc, jnp.minimum(values_bxc - total_bx[..., None], 0)
