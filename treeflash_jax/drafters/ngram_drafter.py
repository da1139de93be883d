"""n-gram drafting (prompt lookup): proposes continuations of earlier occurrences of the last tokens. It has no weights.

Each round searches the text for earlier occurrences of its last tokens, the longest first. Their continuations form a tree
in which common prefixes share nodes. The probability of a token grows with the number of occurrences that continue with it,
with the length of their matches, and with how recent they are. Part of the probability is reserved for tokens that never
followed. A continuation that reaches the end of the text repeats from its first token. If there is no match, the round
verifies one token (`decoding.rounds`). Other drafters can be joined with these continuations (ngram_join.py).

Shape suffixes: b batch, s token slots, m matches, i draft depth, w lanes, c children (at most one per match).

Source: prompt lookup decoding (Saxena, 2023); LLMA (arXiv 2304.04487). The tree and its weights are new.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.typing import DTypeLike

from treeflash_jax.core import sharding
from treeflash_jax.core.parameters import Params
from treeflash_jax.drafters.protocol import Drafter, Inputs, NewPositions, State
from treeflash_jax.models.backend.indexing import pick
from treeflash_jax.trees import Expander

LONGER = 4.0  # factor of a match's weight for each token of its length
OLDER = 0.9  # factor of a match's weight for each more recent match of at least its length
UNSEEN = 0.25  # weight of all tokens that never followed, if the best match weighs 1


@struct.dataclass
class NoState(State):
    """The state of a drafter without memory. The text is an input of every round."""

    def axes(self) -> Self:
        return self

    def grow(self, capacity: int) -> Self:
        return self

    def cut(self, length_b: jax.Array) -> Self:
        return self


@dataclass(frozen=True, kw_only=True)
class NgramDrafter(Drafter):
    """A drafter that looks up n-grams of the text. It fits every verifier.

    Attributes:
      longest, shortest: limits of the length of a match, in tokens.
      matches: number of matches whose continuations are drafted; longer matches come first, then more recent ones.
    """

    kind: ClassVar[str] = "ngram"
    dialect: ClassVar[str] = "ngram"
    settings: ClassVar[tuple[str, ...]] = ("children", "depths")
    may_offer_nothing: ClassVar[bool] = True
    taps: ClassVar[tuple[int, ...]] = ()

    longest: int = 8
    shortest: int = 2
    num_depths: int = 15
    matches: int = 16

    @property
    def children(self) -> int:
        return self.matches

    def configured(self, *, children: int | None = None, depths: int | None = None) -> Self:
        return replace(self, matches=children or self.matches, num_depths=depths or self.num_depths)

    def specs(self) -> dict[str, Any]:
        return {}

    def init(self, batch: int, capacity: int, dtype: DTypeLike) -> NoState:
        return NoState()

    def extend(self, params: Params, verifier_params: Params, state: NoState, new: NewPositions) -> NoState:
        return state

    def draft(self, inputs: Inputs) -> "Continuations":
        """Returns the continuations of the longest matches of the text's last tokens."""
        matches = min(self.matches, inputs.tokens_bs.shape[1])

        def find(tokens_bs: jax.Array, length_b: jax.Array, temperature_b: jax.Array) -> tuple[jax.Array, ...]:
            matched_bs = match_lengths(tokens_bs, length_b, self.longest)
            slots = tokens_bs.shape[1]
            rank_bs = jnp.where(matched_bs >= self.shortest, matched_bs * slots + jnp.arange(slots), -1)
            rank_bm, at_bm = lax.top_k(rank_bs, matches)
            length_bm = pick(matched_bs, at_bm)
            log_weight_bm = (length_bm - length_bm[:, :1]) * jnp.log(LONGER) + jnp.arange(matches) * jnp.log(OLDER)
            scale_b = temperature_b.astype(log_weight_bm.dtype)
            log_weight_bm = jnp.where(rank_bm >= 0, log_weight_bm / scale_b[:, None], -jnp.inf)
            after_bmi = jnp.arange(inputs.depths) % jnp.maximum(length_b[:, None] - at_bm, 1)[..., None]
            return pick(tokens_bs, at_bm[..., None] + after_bmi), length_bm, log_weight_bm, jnp.log(UNSEEN) / scale_b

        return Continuations(*sharding.over_batch(find, inputs.tokens_bs, inputs.length_b, inputs.temperature_b))


@struct.dataclass
class Continuations(Expander):
    """Continuations of the matches of a round. The state says which matches agree with a lane's path.

    Attributes:
      tokens_bmi: continuation of each match.
      log_weight_bm: log-weight of each match; -inf for no match.
      unseen_b: log-weight of the tokens that never followed.
    """

    tokens_bmi: jax.Array
    length_bm: jax.Array
    log_weight_bm: jax.Array
    unseen_b: jax.Array
    is_table = True

    @property
    def num_depths(self) -> int:
        return self.tokens_bmi.shape[2]

    def start(self, width: int) -> jax.Array:
        agrees_bm = jnp.isfinite(self.log_weight_bm)
        return jnp.broadcast_to(agrees_bm[:, None], (agrees_bm.shape[0], width, agrees_bm.shape[1]))

    @jax.jit
    def children(self, depth: jax.Array, agrees_bwm: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns distinct next tokens of the matches that agree with the path, ordered by the sum of their weights."""
        token_bm = self.tokens_bmi[:, :, depth]
        same_bmm = token_bm[:, :, None] == token_bm[:, None]
        log_weight_bwm = jnp.where(agrees_bwm, self.log_weight_bm[:, None], -jnp.inf)
        top_bw1 = jnp.maximum(jnp.max(log_weight_bwm, axis=-1, keepdims=True), self.unseen_b[:, None, None])
        weight_bwm = jnp.exp(log_weight_bwm - top_bw1)  # relative to the largest weight, so that not all underflow
        together_bwm = jnp.einsum("bmn,bwn->bwm", same_bmm.astype(weight_bwm.dtype), weight_bwm)
        earlier_mm = jnp.tri(token_bm.shape[1], k=-1, dtype=bool)
        is_again_bwm = jnp.any((same_bmm & earlier_mm)[:, None] & agrees_bwm[:, :, None], axis=-1)
        total_bw1 = jnp.sum(weight_bwm, axis=-1, keepdims=True) + jnp.exp(self.unseen_b[:, None, None] - top_bw1)
        log_prob_bwm = jnp.log(jnp.where(agrees_bwm & ~is_again_bwm, together_bwm, 0)) - jnp.log(total_bw1)
        cost_bwm, token_bwm = jnp.broadcast_arrays(-log_prob_bwm, token_bm[:, None])
        cost_bwc, token_bwc = lax.sort((cost_bwm, token_bwm), num_keys=1, is_stable=True)
        return token_bwc, jnp.minimum(-cost_bwc, 0)  # at most 0 despite rounding: no child may score above its parent

    def follow_token(self, depth: jax.Array, agrees_bwm: jax.Array, token_bw: jax.Array) -> jax.Array:
        return self.agreeing(depth, agrees_bwm, token_bw[..., None])[..., 0, :]

    def agreeing(self, depth: jax.Array, agrees_bwm: jax.Array, tokens_bwx: jax.Array) -> jax.Array:
        """Returns whether each match agrees with the path and a token after it, [b, w, x, m]."""
        after_bm = self.tokens_bmi[:, :, depth]
        return agrees_bwm[..., None, :] & (tokens_bwx[..., None] == after_bm[:, None, None])


def match_lengths(tokens_bs: jax.Array, length_b: jax.Array, longest: int) -> jax.Array:
    """Returns the length of the match before each position, int32 [b, s].

    This is the number of the text's last tokens, at most `longest`, that also directly precede the position. It is 0
    outside the text, and at its end.
    """
    at_s = jnp.arange(tokens_bs.shape[1])
    matched_bs = jnp.zeros(tokens_bs.shape, jnp.int32)
    is_matched_bs = (at_s < length_b[:, None]) & (at_s > 0)
    for back in range(1, longest + 1):
        last_b1 = jnp.take_along_axis(tokens_bs, jnp.maximum(length_b - back, 0)[:, None], axis=1)
        is_matched_bs &= (jnp.roll(tokens_bs, back, axis=1) == last_b1) & (at_s >= back)
        matched_bs += is_matched_bs
    return matched_bs
