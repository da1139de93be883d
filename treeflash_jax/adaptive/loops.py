"""The loops around the rounds of adaptive decoding, as pure functions of a donated state.

Shape suffixes: b batch, a admitted sequences.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from treeflash_jax.adaptive import budget as budgets
from treeflash_jax.adaptive import rounds
from treeflash_jax.adaptive.state import AdaptivePlan, AdaptiveState, pin
from treeflash_jax.decoding import loops as decoding
from treeflash_jax.decoding.state import DecodeState, Weights


@partial(jax.jit, static_argnames=("plan",), donate_argnames=("state",))
def decode(
    weights: Weights, state: AdaptiveState, max_rounds: jax.Array, enough: jax.Array | None = None, *, plan: AdaptivePlan
) -> AdaptiveState:
    """`decoding.loops.decode` of rounds that choose their nodes.

    Drafted and one-token rounds are loops of their own inside it: a branch that commits would copy the caches, a loop that
    does not run copies nothing.
    """
    enough = state.decode.done_b.size if enough is None else enough

    def goes_on(carry):
        state, count = carry
        return decoding.goes_on(state.decode, count, max_rounds, enough, plan.base)

    def turn(carry):
        carry = decoding.repeat(
            lambda state: rounds.step_round(weights, state, plan),
            carry,
            lambda carry: goes_on(carry) & (carry[0].budget.pause > 0) & ~carry[0].budget.is_full,
            pin,
        )
        state, count = carry
        wanted = goes_on(carry) & ((state.budget.pause == 0) | state.budget.is_full)
        return decoding.repeat(
            lambda state: rounds.choosing_round(weights, state, plan),
            (pin(rounds.catch_up(weights, state, plan, wanted)), count),
            lambda carry: goes_on(carry) & (carry[0].budget.pause == 0),
            pin,
        )

    return lax.while_loop(goes_on, turn, (pin(state), jnp.zeros_like(max_rounds)))[0]


@partial(jax.jit, static_argnames=("plan",), donate_argnames=("state",))
def admit(
    weights: Weights, state: AdaptiveState, fresh: DecodeState, slots_a: jax.Array, plan: AdaptivePlan
) -> AdaptiveState:
    """`decoding.loops.admit`, after the drafter has seen what it has put off.

    All sequences then have equally many tokens pending: none.
    """
    state = rounds.catch_up(weights, state, plan, jnp.bool_(True))
    is_new_b = jnp.any(jnp.arange(state.decode.end_b.size)[:, None] == slots_a, axis=1)
    return pin(AdaptiveState(decoding.admit(state.decode, fresh, slots_a), budgets.forget(state.budget, is_new_b)))


@partial(jax.jit, static_argnames=("capacity",))
def grow(state: AdaptiveState, capacity: int) -> AdaptiveState:
    """The same state with room for `capacity` positions."""
    return pin(AdaptiveState(decoding.grow(state.decode, capacity), budgets.grow(state.budget, capacity)))
