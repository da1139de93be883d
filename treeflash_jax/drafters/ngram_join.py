"""Trees of another drafter joined with n-grams of the text.

Shape suffixes: b batch, w lanes, c children, m matches, x tokens.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from treeflash_jax.drafters.ngram_drafter import Continuations, NgramDrafter
from treeflash_jax.drafters.protocol import Inputs
from treeflash_jax.trees import Expander

HALF = 3.0  # length of a match at which n-grams count as much as the other drafter


@struct.dataclass
class JoinedExpander(Expander):
    """Another drafter's expander joined with n-grams. The state is a pair: the drafter's state, and the n-grams'.

    A token's probability is (1 - s) p + s q, where p is the drafter's probability and q is the n-grams'. The share
    s = l^2 / (l^2 + HALF^2) grows with l, the length of the longest match that agrees with the path. The path counts as
    part of this length; l is 0 without a match. HALF and the exponent were fitted to answers of SmolLM2 to training
    prompts.

    Attributes:
      drafter: the other drafter's expander, which is also followed below tokens of n-grams.
    """

    drafter: Expander
    ngrams: Continuations

    @property
    def is_table(self) -> bool:
        return self.drafter.is_table

    @property
    def num_depths(self) -> int:
        return self.drafter.num_depths

    def start(self, width: int) -> tuple[Any, jax.Array]:
        return self.drafter.start(width), self.ngrams.start(width)

    @jax.jit
    def children(self, depth: jax.Array, state_bw: tuple[Any, jax.Array]) -> tuple[jax.Array, jax.Array]:
        drafter_bw, agrees_bwm = state_bw
        tokens_bwc, log_p_bwc = self.drafter.children(depth, drafter_bw)
        copied_bwm, log_q_bwm = self.ngrams.children(depth, agrees_bwm)
        length_bw1 = jnp.max(jnp.where(agrees_bwm, self.ngrams.length_bm[:, None] + depth, 0), axis=-1, keepdims=True)
        share_bw1 = (length_bw1**2 / (length_bw1**2 + HALF**2)).astype(log_p_bwc.dtype)
        p_bwc, q_bwm = (1 - share_bw1) * jnp.exp(log_p_bwc), share_bw1 * jnp.exp(log_q_bwm)
        same_bwcm = (tokens_bwc[..., None] == copied_bwm[..., None, :]) & (p_bwc[..., None] > 0)
        p_bwc += jnp.sum(jnp.where(same_bwcm, q_bwm[..., None, :], 0), axis=-1)
        q_bwm = jnp.where(same_bwcm.any(axis=-2), 0, q_bwm)
        cost_bwx = -jnp.log(jnp.concatenate([p_bwc, q_bwm], axis=-1))
        cost_bwx, token_bwx = lax.sort((cost_bwx, jnp.concatenate([tokens_bwc, copied_bwm], axis=-1)), num_keys=1)
        return token_bwx, -cost_bwx

    def follow_token(self, depth: jax.Array, state_bw: tuple[Any, jax.Array], token_bw: jax.Array) -> tuple[Any, jax.Array]:
        drafter_bw, agrees_bwm = state_bw
        below_bw = self.drafter.follow_token(depth, drafter_bw, token_bw)
        return below_bw, self.ngrams.follow_token(depth, agrees_bwm, token_bw)

    def continues_below(self, depth: jax.Array, state_bw: tuple[Any, jax.Array], tokens_bwx: jax.Array) -> jax.Array:
        drafter_bw, agrees_bwm = state_bw
        drafts_on_bwx = self.drafter.continues_below(depth, drafter_bw, tokens_bwx)
        copies_on_bwx = self.ngrams.agreeing(depth, agrees_bwm, tokens_bwx).any(axis=-1)
        return (depth + 1 < self.num_depths) & (drafts_on_bwx | copies_on_bwx)


def join_ngrams(drafter: Expander, inputs: Inputs, matches: int) -> Expander:
    """Joins another drafter's expander with up to `matches` n-grams. Returns it unchanged if `matches` is 0."""
    if not matches:
        return drafter
    ngrams = NgramDrafter(shortest=1, matches=matches)
    return JoinedExpander(drafter, ngrams.draft(replace(inputs, depths=drafter.num_depths)))
