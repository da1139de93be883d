"""A correction of low rank, added to the marginal logits:

    logits(v | previous token a) = marginal(v) + <u, W2[v]>

    lowrank        u = W1[a]
    lowrank-gated  u = W1[a] * sigmoid(Wg [z; W1[a]] + b), z the slot's hidden state after the final norm
    lowrank-rnn    u = tanh(o), state' = g * state + (1 - g) * tanh(c), [g; c; o] = Wj [state; W1[a]; z] + b, sigmoid of g

The candidates of a depth are the likeliest tokens of its marginal. Only their vectors of two tables are read, not the whole
vocabulary again. With W2 = 0, as at the start of training, the head equals the marginal head.

Shape suffixes: b batch, i draft depth, m contexts (slot, previous token), x candidates of a depth, c children kept, d
model, k rank, v vocabulary; `...` is any leading axes.

Source: DSpark (arXiv 2607.05147), Markov heads "vanilla", "gated" and "rnn".
"""

from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from treeflash_jax.core.dtypes import at_least_float32
from treeflash_jax.core.parameters import Entry, Params, Spec
from treeflash_jax.drafters.block.heads.block_head import (
    Block,
    DrafterSizes,
    Head,
    Unembed,
    candidate_table,
    head_rank,
    mass_elsewhere,
    scored_size,
)
from treeflash_jax.drafters.block.heads.path_head import PathHead
from treeflash_jax.models import vocab
from treeflash_jax.models.quantized import product
from treeflash_jax.trees import TransitionTable

TABLES = {
    "previous": Entry("markov_head.markov_w1.weight", order=(0, 1)),
    "following": Entry("markov_head.markov_w2.weight", order=(0, 1)),
}


def table_specs(drafter: DrafterSizes) -> dict[str, Spec]:
    """Returns the specs of W1 and W2."""
    rank = head_rank(drafter)
    previous = Spec((drafter.layers.vocab_size, rank), ("vocab", None), inputs=(1,))
    return {"previous": previous, "following": replace(previous, shape=(scored_size(drafter), rank), init="zeros")}


class LowRankHead(Head):
    file_name = "lowrank"
    entries: ClassVar[dict[str, Entry]] = TABLES
    scored = ("following",)

    def specs(self, drafter: DrafterSizes) -> dict[str, Any]:
        return table_specs(drafter)

    def vectors(self, params: Params, before: jax.Array, normed: jax.Array) -> jax.Array:
        """Returns u [..., k] from W1[a] [..., k] and the slots' hidden states after the final norm [..., d]."""
        return before

    def count_listed(self, drafter: DrafterSizes) -> int:
        """Returns the number of tokens to score per depth, the likeliest of its marginal."""
        return max(drafter.candidates, drafter.children, drafter.shortlist)

    def logits(
        self, params: Params, unembed: Unembed, previous_bm: jax.Array, hidden_bmd: jax.Array, drafter: DrafterSizes
    ) -> jax.Array:
        normed_bmd = unembed.normed(hidden_bmd)
        vectors_bmk = self.vectors(params, vocab.embed(params["previous"], previous_bm), normed_bmd)
        marginal_bmv = unembed.logits(normed_bmd)
        return marginal_bmv + vocab.unembed(params["following"], vectors_bmk).astype(marginal_bmv.dtype)

    def expand(self, params: Params, unembed: Unembed, block: Block, drafter: DrafterSizes) -> TransitionTable:
        """Returns the transition table [b, i, m, c] of q(token | previous token).

        Children are among the likeliest marginal tokens of their depth. Tokens off that list keep their marginal mass.
        """
        listed = self.count_listed(drafter)
        m = min(drafter.candidates, listed)
        batch = block.anchor_b.shape[0]
        normed_bid = unembed.normed(block.hidden_bid)
        marginal_biv = unembed.logits(normed_bid)
        dtype = at_least_float32(marginal_biv.dtype)
        likely_bix, ids_bix = vocab.top_k(marginal_biv, listed)
        tokens_bix = unembed.tokens(ids_bix)
        scale_b = block.temperature_b.astype(dtype)
        likely_bix = likely_bix.astype(dtype) / scale_b[:, None, None]
        elsewhere_bi = mass_elsewhere(marginal_biv, likely_bix, scale_b)

        anchor_b1m = jnp.broadcast_to(block.anchor_b[:, None, None], (batch, 1, m))
        previous_bim = jnp.concatenate([anchor_b1m, tokens_bix[:, :-1, :m]], axis=1)
        before_bimk = self.vectors(params, vocab.embed(params["previous"], previous_bim), normed_bid[:, :, None])
        after_bixk = vocab.embed(params["following"], ids_bix if drafter.owns_vocabulary else tokens_bix)
        change_bimx = jnp.einsum("bimk,bixk->bimx", before_bimk, after_bixk, preferred_element_type=dtype)
        scores_bimx = likely_bix[:, :, None] + change_bimx / scale_b[:, None, None, None]
        listed_bim = jax.nn.logsumexp(scores_bimx, axis=-1)
        if self.trains_candidates:  # scores only compare candidates, so these keep their total marginal mass
            likely_bi = jax.nn.logsumexp(likely_bix, axis=-1)
            total_bim = listed_bim + (jnp.logaddexp(likely_bi, elsewhere_bi) - likely_bi)[..., None]
        else:
            total_bim = jnp.logaddexp(listed_bim, elsewhere_bi[..., None])
        log_probs_bimx = jnp.minimum(scores_bimx - total_bim[..., None], 0)
        return candidate_table(tokens_bix, log_probs_bimx, drafter.children)


class GatedLowRankHead(LowRankHead):
    file_name = "lowrank-gated"
    entries: ClassVar[dict[str, Entry]] = TABLES | {
        "gate": Entry("markov_head.gate_proj.weight", order=(1, 0)),
        "gate_bias": Entry("markov_head.gate_proj.bias"),
    }

    def specs(self, drafter: DrafterSizes) -> dict[str, Any]:
        width, rank = drafter.layers.hidden_size, head_rank(drafter)
        gate = Spec((width + rank, rank), (None, None), inputs=(0,), outputs=(1,))
        return table_specs(drafter) | {"gate": gate, "gate_bias": Spec((rank,), (None,), "zeros")}

    def vectors(self, params: Params, before: jax.Array, normed: jax.Array) -> jax.Array:
        of_slot, of_token = jnp.split(params["gate"], [normed.shape[-1]])
        gate = product("...d,dk->...k", normed, of_slot) + product("...k,kl->...l", before, of_token)
        return before * jax.nn.sigmoid(gate + params["gate_bias"])


class RnnLowRankHead(PathHead):
    file_name = "lowrank-rnn"
    entries: ClassVar[dict[str, Entry]] = TABLES | {
        "joint": Entry("markov_head.joint_proj.weight", order=(1, 2, 0), row_axes=2),
        "joint_bias": Entry("markov_head.joint_proj.bias", order=(0, 1), row_axes=2),
    }
    scored = ("following",)

    def specs(self, drafter: DrafterSizes) -> dict[str, Any]:
        width, rank = drafter.layers.hidden_size, head_rank(drafter)
        joint = Spec((2 * rank + width, 3, rank), (None, None, None), inputs=(0,), outputs=(1, 2))
        return table_specs(drafter) | {"joint": joint, "joint_bias": Spec((3, rank), (None, None), "zeros")}

    def state_size(self, drafter: DrafterSizes) -> int:
        return head_rank(drafter)

    def step(
        self, params: Params, unembed: Unembed, state: jax.Array, token: jax.Array, normed: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        before = vocab.embed(params["previous"], token)
        normed = jnp.broadcast_to(normed, (*token.shape, normed.shape[-1]))
        read = jnp.concatenate([state.astype(before.dtype), before, normed.astype(before.dtype)], axis=-1)
        joint = product("...j,jyk->...yk", read, params["joint"]) + params["joint_bias"]
        gate = joint[..., 0, :]
        candidate = joint[..., 1, :]
        output = joint[..., 2, :]
        gate = jax.nn.sigmoid(gate)
        return jnp.tanh(output), gate * state + (1 - gate) * jnp.tanh(candidate)
