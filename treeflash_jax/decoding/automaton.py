"""Automata over tokens: answers that follow a schema, a pattern or a choice.

Tokens that lead from every state to the same next state form a class. So the table of a pattern is small even for a large
vocabulary. Tables are data of each sequence: another pattern with tables of the same size runs the same programs.

Source: Efficient Guided Generation for Large Language Models (arXiv 2307.09702). In addition, the automaton here follows
every path of a draft tree, on the device.

Shape suffixes: b batch, n tree nodes, q states, c classes, v vocabulary, x one or two axes.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from treeflash_jax.trees import Expander

NOWHERE = -1  # next state after a token that the pattern does not allow


@struct.dataclass
class Automaton:
    """The automaton of each sequence. State 0 is the state of an empty answer. Sequences without a pattern have one state.

    Attributes:
      next_bqc: state after a token of each class; NOWHERE if it is not allowed. Tokens that end an answer have separate
        classes, which lead from a final state to itself or to another final state.
      class_bv: class of each token.
    """

    next_bqc: jax.Array
    class_bv: jax.Array

    def start(self, tokens_bs: jax.Array, length_b: jax.Array) -> jax.Array:
        """Returns the states of empty answers, [b]."""
        return jnp.zeros_like(length_b)

    def advance(self, state_bx: jax.Array, tokens_bx: jax.Array) -> jax.Array:
        """Returns the states after one more token; NOWHERE stays NOWHERE."""
        batch_bx = jnp.arange(state_bx.shape[0]).reshape(-1, *(1,) * (state_bx.ndim - 1))
        class_bx = self.class_bv[batch_bx, tokens_bx]
        return jnp.where(state_bx == NOWHERE, NOWHERE, self.next_bqc[batch_bx, state_bx, class_bx])

    def constrain(self, logits_bnv: jax.Array, state_bn: jax.Array) -> jax.Array:
        """Returns logits with -inf for tokens that are not allowed.

        Logits of nodes in state NOWHERE are unchanged: no acceptance rule reaches these nodes.
        """
        is_allowed_bnc = jnp.take_along_axis(self.next_bqc, state_bn[..., None], axis=1) != NOWHERE
        is_allowed_bnc |= (state_bn == NOWHERE)[..., None]
        is_allowed_bnv = jnp.take_along_axis(is_allowed_bnc, self.class_bv[:, None], axis=2)
        return jnp.where(is_allowed_bnv, logits_bnv, -jnp.inf)


@struct.dataclass
class ConstrainedExpander(Expander):
    """A drafter's expander without the children that the automaton forbids. Allowed children share their probability.

    The state is a pair of the drafter's state and the automaton's.
    """

    drafter: Expander
    automaton: Automaton
    root_b: jax.Array

    @property
    def is_table(self) -> bool:
        return self.drafter.is_table

    @property
    def num_depths(self) -> int:
        return self.drafter.num_depths

    def start(self, width: int) -> tuple[Any, jax.Array]:
        return self.drafter.start(width), jnp.broadcast_to(self.root_b[:, None], (self.root_b.size, width))

    def children(self, depth: jax.Array, state_bw: tuple[Any, jax.Array]) -> tuple[jax.Array, jax.Array]:
        drafter_bw, at_bw = state_bw
        tokens_bwc, log_p_bwc = self.drafter.children(depth, drafter_bw)
        is_allowed_bwc = jnp.isfinite(log_p_bwc) & (self._after(at_bw, tokens_bwc, log_p_bwc) != NOWHERE)
        cost_bwc = jnp.where(is_allowed_bwc, -log_p_bwc, jnp.inf)
        cost_bwc, tokens_bwc = lax.sort((cost_bwc, tokens_bwc), num_keys=1)
        mass_bw1 = jax.nn.logsumexp(-cost_bwc, axis=-1, keepdims=True)
        mass_bw1 = jnp.where(jnp.isfinite(mass_bw1), mass_bw1, 0)  # -inf if no child is allowed
        return tokens_bwc, jnp.minimum(-cost_bwc - mass_bw1, 0)

    def _after(self, at_bw: jax.Array, tokens_bwc: jax.Array, log_p_bwc: jax.Array) -> jax.Array:
        """Returns the automaton's state below each child, [b, w, c]."""
        tokens_bwc = jnp.where(jnp.isfinite(log_p_bwc), tokens_bwc, 0)
        return self.automaton.advance(jnp.broadcast_to(at_bw[..., None], tokens_bwc.shape), tokens_bwc)

    def follow_token(self, depth: jax.Array, state_bw: tuple[Any, jax.Array], token_bw: jax.Array) -> tuple[Any, jax.Array]:
        drafter_bw, at_bw = state_bw
        return self.drafter.follow_token(depth, drafter_bw, token_bw), self.automaton.advance(at_bw, token_bw)

    def continues_below(self, depth: jax.Array, state_bw: tuple[Any, jax.Array], tokens_bwx: jax.Array) -> jax.Array:
        return self.drafter.continues_below(depth, state_bw[0], tokens_bwx)
