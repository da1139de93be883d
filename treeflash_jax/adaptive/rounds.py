"""The rounds of adaptive decoding, built from the stages of `decoding.rounds`.

Shape suffixes: b batch, n tree nodes, p rows of an accepted path.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from treeflash_jax import mesh as meshes
from treeflash_jax import trees
from treeflash_jax.adaptive import budget as budgets
from treeflash_jax.adaptive.state import AdaptivePlan, AdaptiveState
from treeflash_jax.decoding.rounds import (
    Accepted,
    Verified,
    along_path,
    commit_path,
    draft_tree,
    extend_drafter,
    judged,
)
from treeflash_jax.decoding.state import Weights
from treeflash_jax.verifiers.attention import positions_read


def choosing_round(weights: Weights, state: AdaptiveState, plan: AdaptivePlan) -> AdaptiveState:
    """A round of the best-first tree's first nodes, as many of the plan's buckets as pay best.

    Every bucket is a branch that reads the caches and hands on what its path commits, in the shapes of the largest.
    """
    decode, base = state.decode, plan.base
    tree, _ = draft_tree(weights, decode, base)
    live_b = ~decode.done_b
    with jax.named_scope("choose"):
        positions = positions_read(base.attention, decode.capacity, jnp.max(decode.cache.length_b))
        choice = budgets.choose(state.budget, tree, live_b, positions, plan.buckets)

    def judge(nodes: int) -> tuple[Verified, Accepted]:
        own, part = replace(base, num_nodes=nodes), trees.first(tree, nodes)
        return along_path(*judged(weights, decode, part, None, own), base.path_rows)

    kept, accepted = lax.switch(choice.index, [partial(judge, nodes) for nodes in plan.buckets])
    budget = budgets.note(state.budget, decode.rounds_b, live_b, choice.nodes)
    budget = budgets.learn(budget, choice, accepted.length_b, live_b)
    return AdaptiveState(commit_path(weights, decode, kept, accepted, base), budget)


def step_round(weights: Weights, state: AdaptiveState, plan: AdaptivePlan) -> AdaptiveState:
    """A one-token round while drafting pauses; the drafter gets to see its token later, by `catch_up`."""
    before, one = state.decode, replace(plan.base, num_nodes=1)  # with the features that the drafter will need
    tree, _ = draft_tree(weights, before, plan.base.one_token())
    verified, accepted = judged(weights, before, tree, None, one)
    after = commit_path(weights, before, verified, accepted, replace(one, builder="none"))
    budget = budgets.note(state.budget, before.rounds_b, ~before.done_b, 1)
    return AdaptiveState(after, budgets.put_off(budget, verified.features_btj, after.end_b - before.end_b))


def catch_up(weights: Weights, state: AdaptiveState, plan: AdaptivePlan, wanted: jax.Array) -> AdaptiveState:
    """Shows the drafter the tokens that are pending, if that is wanted.

    A loop of one turn or none: a branch would copy the drafter's context.
    """
    decode, features_bpj = state.decode, state.budget.features_bpj
    first_b = decode.cache.length_b - state.budget.pending_b + 1  # where the tokens after these positions begin

    def extend(carry):
        drafter, pending_b = carry
        tokens_bp = trees.pick(decode.tokens_bs, first_b[:, None] + jnp.arange(features_bpj.shape[1]))
        drafter = meshes.pin(drafter, drafter.axes())
        drafter = extend_drafter(weights, drafter, plan.base, features_bpj, tokens_bp, pending_b)
        return drafter, jnp.zeros_like(pending_b)

    with jax.named_scope("catch_up"):
        carry = decode.drafter, state.budget.pending_b
        drafter, pending_b = lax.while_loop(lambda carry: wanted & jnp.any(carry[1] > 0), extend, carry)
    return AdaptiveState(decode.replace(drafter=drafter), state.budget.replace(pending_b=pending_b))
