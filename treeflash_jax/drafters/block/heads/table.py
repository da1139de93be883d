"""The two-stage approximation shared by first-order heads: candidates from the marginals, then all transitions at once.

Shape suffixes: b batch, q block slots, i draft depth, m previous-token rows, r = 1 + (i - 1) m rows of the second stage,
c children kept, d model, v vocabulary, z shortlisted tokens.

Source: TreeFlash (arXiv 2606.03819), two-stage approximation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from treeflash_jax import vocab
from treeflash_jax.trees import TransitionTable
from treeflash_jax.verifiers.layers import rms_norm


@dataclass(frozen=True, kw_only=True)
class DraftSettings:
    """Static sizes of a draft.

    Attributes:
      candidates: previous tokens kept per depth (M).
      children: kept per row (K).
      shortlist: the second stage scores this many likeliest marginal tokens of every depth, those of all depths together;
        0: the whole vocabulary.
      head: which head expands the block; None: the drafter's own.
    """

    candidates: int = 16
    children: int = 16
    shortlist: int = 0
    head: str | None = None


@struct.dataclass
class Unembed:
    """What a head borrows: the verifier's tables and the drafter's final norm."""

    embed_vd: jax.Array
    unembed_vd: jax.Array
    norm: jax.Array
    eps: float = struct.field(pytree_node=False)

    def normed(self, hidden: jax.Array) -> jax.Array:
        return rms_norm(hidden, self.norm, self.eps)

    def likeliest(self, hidden_brd: jax.Array, k: int, temperature_b: jax.Array) -> tuple[jax.Array, jax.Array]:
        return vocab.likeliest(self.unembed_vd, self.normed(hidden_brd), k, temperature_b)


ByRow = Callable[[jax.Array], jax.Array]  # what slots have [b, q, ...] -> what the slot of each row has [b, r, ...]
# (previous-token embeddings [b, r, d], ByRow, raw block [b, q, d], normed block) -> corrected [b, r, d]
Correct = Callable[[jax.Array, ByRow, jax.Array, jax.Array], jax.Array]


def marginal_table(
    unembed: Unembed, hidden_bqd: jax.Array, settings: DraftSettings, temperature_b: jax.Array
) -> TransitionTable:
    """One row per depth, whatever the previous token: the marginals of the block. Source: DDTree (arXiv 2604.12989)."""
    tokens_bic, log_probs_bic = unembed.likeliest(hidden_bqd[:, 1:], settings.children, temperature_b)
    next_row_bic = jnp.zeros_like(tokens_bic).at[:, -1].set(-1)
    return TransitionTable(tokens_bic[:, :, None], log_probs_bic[:, :, None], next_row_bic[:, :, None])


def first_order_table(
    correct: Correct,
    unembed: Unembed,
    hidden_bqd: jax.Array,
    anchor_b: jax.Array,
    settings: DraftSettings,
    temperature_b: jax.Array,
) -> TransitionTable:
    """Rows (depth i, previous token m) from one batched pass of `correct` over all of them.

    Stage one: the M likeliest marginal tokens of each slot are the previous tokens of the next depth; depth 0 has one, the
    anchor. Stage two: corrected hidden state, vocabulary, top K, for all 1 + (depths - 1) M rows at once. A child whose
    token is no candidate of its depth has no row to continue with and ends its branch.

    With a shortlist, stage two reads the vocabulary table for the shortlisted tokens only: the second pass over it, and the
    search through its logits, go. A child off the list is missed, which costs acceptance and nothing else.
    """
    batch, size, _ = hidden_bqd.shape
    depths, m = size - 1, settings.candidates
    normed_bqd = unembed.normed(hidden_bqd)
    marginal_biv = vocab.unembed(unembed.unembed_vd, normed_bqd[:, 1 : size if settings.shortlist else size - 1])
    likely_bix = jnp.zeros((batch, 0, m), jnp.int32)
    if marginal_biv.shape[1]:
        _, likely_bix = vocab.top_k(marginal_biv, max(m, settings.shortlist))
    candidates_bim = likely_bix[:, : depths - 1, :m]

    previous_br = jnp.concatenate([anchor_b[:, None], candidates_bim.reshape(batch, -1)], axis=1)

    slot_r = jnp.concatenate([jnp.ones(1, jnp.int32), jnp.repeat(jnp.arange(2, size), m)])

    def by_row(slots: jax.Array) -> jax.Array:
        """Gathered; on a CPU, where a fusion that gathers takes twice as long, repeated."""

        def repeated(slots: jax.Array) -> jax.Array:
            return jnp.concatenate([slots[:, 1:2], jnp.repeat(slots[:, 2:], m, axis=1)], axis=1)

        return lax.platform_dependent(slots, cpu=repeated, default=lambda slots: slots[:, slot_r])

    corrected_brd = correct(vocab.embed(unembed.embed_vd, previous_br), by_row, hidden_bqd, normed_bqd)
    if settings.shortlist:
        tokens_brc, log_probs_brc = _shortlisted(
            unembed, corrected_brd, by_row, marginal_biv, likely_bix[..., : settings.shortlist], settings, temperature_b
        )
    else:
        tokens_brc, log_probs_brc = unembed.likeliest(corrected_brd, settings.children, temperature_b)

    def table(rows_brc: jax.Array) -> jax.Array:
        """[b, r, c] -> [b, i, m, c]; the one row of depth 0 fills its m."""
        first = jnp.broadcast_to(rows_brc[:, :1], (batch, m, rows_brc.shape[2]))
        return jnp.concatenate([first, rows_brc[:, 1:]], axis=1).reshape(batch, depths, m, -1)

    tokens_bimc = table(tokens_brc)
    same_bimcm = tokens_bimc[:, :-1, :, :, None] == candidates_bim[:, :, None, None, :]
    row_bimc = jnp.where(same_bimcm.any(-1), jnp.argmax(same_bimcm, axis=-1), -1).astype(jnp.int32)
    leaves_bimc = jnp.full_like(tokens_bimc[:, -1:], -1)
    return TransitionTable(tokens_bimc, table(log_probs_brc), jnp.concatenate([row_bimc, leaves_bimc], axis=1))


def mass_elsewhere(marginal_biv: jax.Array, listed_biz: jax.Array, temperature_b: jax.Array) -> jax.Array:
    """log of the sum of exp over what is not listed, [b, i], of marginal logits at a temperature.

    Args:
      marginal_biv: logits.
      listed_biz: those of the listed tokens, divided by the temperature; -inf where a token is listed again.
      temperature_b: above 0.
    """
    scale_b11 = temperature_b[:, None, None].astype(listed_biz.dtype)
    whole_bi = vocab.log_sum_exp(marginal_biv.astype(listed_biz.dtype) / scale_b11)
    share_bi = jnp.sum(jnp.exp(listed_biz - whole_bi[..., None]), axis=-1)
    return whole_bi + jnp.log(jnp.maximum(1 - share_bi, 0))


def corrected_logits(correct: Correct, unembed: Unembed, previous_br: jax.Array, hidden_brd: jax.Array) -> jax.Array:
    """`logits` of a head that corrects hidden states: one row per slot."""
    embedding_brd, normed_brd = vocab.embed(unembed.embed_vd, previous_br), unembed.normed(hidden_brd)
    corrected_brd = correct(embedding_brd, lambda slots: slots, hidden_brd, normed_brd)
    return vocab.unembed(unembed.unembed_vd, unembed.normed(corrected_brd))


def first_order(correct: Callable[..., jax.Array]) -> tuple[Callable[..., jax.Array], Callable[..., TransitionTable]]:
    """`logits` and `expand` of a head whose `correct` takes its weights before the arguments of `Correct`; see `heads`."""

    def logits(params: Any, unembed: Unembed, previous_br: jax.Array, hidden_brd: jax.Array) -> jax.Array:
        return corrected_logits(partial(correct, params), unembed, previous_br, hidden_brd)

    def expand(params: Any, unembed: Unembed, hidden_bqd: jax.Array, *args: Any) -> TransitionTable:
        return first_order_table(partial(correct, params), unembed, hidden_bqd, *args)

    return logits, expand


def _shortlisted(
    unembed: Unembed,
    corrected_brd: jax.Array,
    by_row: ByRow,
    marginal_biv: jax.Array,
    likely_bix: jax.Array,
    settings: DraftSettings,
    temperature_b: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """`vocab.top_log_probs` of the corrected rows among the tokens that are likely at any depth, [b, r, c] each.

    What a row has off the list is taken to be what the marginal of its depth has there, before normalising.
    """
    batch = likely_bix.shape[0]
    tokens_bz = likely_bix.reshape(batch, -1)
    earlier_zz = jnp.tri(tokens_bz.shape[1], k=-1, dtype=bool)
    again_bz = jnp.any((tokens_bz[:, :, None] == tokens_bz[:, None]) & earlier_zz, axis=-1)
    wide = jnp.promote_types(corrected_brd.dtype, jnp.float32)
    temperature_b11 = temperature_b[:, None, None].astype(wide)

    def scaled(logits: jax.Array) -> jax.Array:
        """Of the listed tokens, each once."""
        return jnp.where(again_bz[:, None], -jnp.inf, logits.astype(wide) / temperature_b11)

    rows_bzd = vocab.embed(unembed.unembed_vd, tokens_bz)
    scores_brz = scaled(jnp.einsum("brd,bzd->brz", unembed.normed(corrected_brd), rows_bzd, preferred_element_type=wide))
    listed_biz = scaled(
        vocab.take(marginal_biv, jnp.broadcast_to(tokens_bz[:, None], (*marginal_biv.shape[:2], tokens_bz.shape[1])))
    )
    rest_bi = mass_elsewhere(marginal_biv, listed_biz, temperature_b)
    total_br = jnp.logaddexp(jax.nn.logsumexp(scores_brz, axis=-1), by_row(jnp.pad(rest_bi, ((0, 0), (1, 0)))))
    values_brc, at_brc = vocab.local_top_k(scores_brz, min(settings.children, scores_brz.shape[-1]))
    tokens_brc = jnp.take_along_axis(tokens_bz[:, None], at_brc, axis=-1)
    return tokens_brc, jnp.minimum(values_brc - total_br[..., None], 0)
