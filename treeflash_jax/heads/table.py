"""The two-stage approximation shared by first-order heads: candidates from the marginals, then all transitions at once.

Shape suffixes: b batch, q block slots, i draft depth, m previous-token rows, r = 1 + (i - 1) m rows of the second stage,
c children kept, d model, v vocabulary.

Source: TreeFlash (arXiv 2606.03819), two-stage approximation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct

from treeflash_jax import vocab
from treeflash_jax.layers import rms_norm
from treeflash_jax.tree import TransitionTable


@dataclass(frozen=True, kw_only=True)
class DraftSettings:
    """Static sizes of a draft: `candidates` previous tokens kept per depth (M), `children` kept per row (K)."""

    candidates: int = 16
    children: int = 16


@struct.dataclass
class Unembed:
    """What a head borrows: the verifier's tables and the drafter's final norm."""

    embed_vd: jax.Array
    unembed_vd: jax.Array
    norm: jax.Array
    eps: float = struct.field(pytree_node=False)

    def normed(self, hidden: jax.Array) -> jax.Array:
        return rms_norm(hidden, self.norm, self.eps)

    def logits(self, hidden: jax.Array) -> jax.Array:
        return vocab.unembed(self.unembed_vd, self.normed(hidden))


# (previous-token embeddings [b, r, d], slot of each row [r], raw block [b, q, d], normed block) -> corrected [b, r, d]
Correct = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def marginal_table(
    unembed: Unembed, hidden_bqd: jax.Array, settings: DraftSettings, temperature_b: jax.Array
) -> TransitionTable:
    """One row per depth, whatever the previous token: the marginals of the block. Source: DDTree (arXiv 2604.12989)."""
    tokens_bic, log_probs_bic = vocab.top_log_probs(
        unembed.logits(hidden_bqd[:, 1:]), settings.children, temperature_b[:, None, None]
    )
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
    """
    batch, size, _ = hidden_bqd.shape
    depths, m = size - 1, settings.candidates
    normed_bqd = unembed.normed(hidden_bqd)
    if depths > 1:
        _, candidates_bim = vocab.top_k(vocab.unembed(unembed.unembed_vd, normed_bqd[:, 1:-1]), m)
    else:
        candidates_bim = jnp.zeros((batch, 0, m), jnp.int32)

    previous_br = jnp.concatenate([anchor_b[:, None], candidates_bim.reshape(batch, -1)], axis=1)
    slot_r = jnp.concatenate([jnp.ones(1, jnp.int32), jnp.repeat(jnp.arange(2, size), m)])
    corrected_brd = correct(vocab.embed(unembed.embed_vd, previous_br), slot_r, hidden_bqd, normed_bqd)
    tokens_brc, log_probs_brc = vocab.top_log_probs(
        unembed.logits(corrected_brd), settings.children, temperature_b[:, None, None]
    )

    def table(rows_brc: jax.Array) -> jax.Array:
        """[b, r, c] -> [b, i, m, c]; the one row of depth 0 fills its m."""
        first = jnp.broadcast_to(rows_brc[:, :1], (batch, m, rows_brc.shape[2]))
        return jnp.concatenate([first, rows_brc[:, 1:]], axis=1).reshape(batch, depths, m, -1)

    tokens_bimc = table(tokens_brc)
    same_bimcm = tokens_bimc[:, :-1, :, :, None] == candidates_bim[:, :, None, None, :]
    row_bimc = jnp.where(same_bimcm.any(-1), jnp.argmax(same_bimcm, axis=-1), -1).astype(jnp.int32)
    leaves_bimc = jnp.full_like(tokens_bimc[:, -1:], -1)
    return TransitionTable(tokens_bimc, table(log_probs_brc), jnp.concatenate([row_bimc, leaves_bimc], axis=1))
