"""The policy of nodes="auto": chooses on the device how many nodes a round verifies, and whether it drafts at all.

Nodes of a best-first tree are in order of decreasing path probability, so the first n of them are the tree of n nodes.
A round drafts once, with the largest bucket, and verifies the bucket that maximises tokens per second,

    argmax_n (1 + c (Phi(n) - 1)) / T(n),    Phi(n) = sum of the path probabilities of the first n nodes (root = 1),

averaged over the sequences that are not done: one bucket a round for the whole batch. T is the measured time of a round
(calibration.py), c the ratio of accepted to expected tokens so far. The probabilities do not depend on the noise of the
verifier's samples, so every choice gives the same answer.

Drafting pauses once its debt, the time lost to one-token decoding, exceeds PATIENCE one-token rounds (a CUSUM test: gains
reduce the debt, at most to 0). During a pause, features of new tokens are buffered until the next draft. Pauses grow
geometrically, and no probe (the drafted round after a pause) costs more than PROBE_SHARE of the next pause. So a call
loses little more than PATIENCE rounds and that share of its time, whatever the prompt.

Shape suffixes: b batch, n nodes or buckets, c measured cache lengths, p pending tokens, j tapped layers x model.

Source: CaDDTree for the objective. It searches every n greedily; here the argmax is over a few buckets.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from treeflash_jax import trees
from treeflash_jax.core import sharding
from treeflash_jax.decoding import rounds
from treeflash_jax.decoding.accepting import Accepted
from treeflash_jax.decoding.state import DecodePlan, DecodeState, Weights
from treeflash_jax.models.attention import positions_read
from treeflash_jax.trees import DraftTree

PATIENCE = 3.0  # one-token rounds
PROBE_SHARE = 0.01  # cost of a probe, in one-token rounds, relative to the rounds of the pause after it
FIRST_PAUSE, LONGEST_PAUSE = 8, 2**15  # rounds
PRIOR_TOKENS = 32.0  # weight of the calibration's reliability, in drafted tokens


@struct.dataclass
class Measured:
    """Measurements for one batch size; traced, so changing them never recompiles.

    Times are linear in the positions between the measured ones, and constant beyond them.

    Attributes:
      positions_c: numbers of cached positions that the measured rounds read, increasing.
      round_cn: seconds of a drafted round, by bucket.
      step_c: seconds of a one-token round.
      reliability: ratio of accepted to expected tokens, roots excluded.
      debt: initial debt of drafting, in one-token rounds.
    """

    positions_c: jax.Array
    round_cn: jax.Array
    step_c: jax.Array
    reliability: jax.Array
    debt: jax.Array


@struct.dataclass
class Budget:
    """State of the policy.

    Attributes:
      expected, committed: expected and actual numbers of committed draft tokens, averaged over live sequences and summed
        over rounds, starting from the calibration's prior; c is committed / expected.
      debt: time lost by drafting, in one-token rounds, 0 to PATIENCE.
      pause: remaining one-token rounds before the next draft.
      last_pause: length of the last pause; 0 once the debt is back to 0.
      features_bpj: features of pending tokens, which are not in the drafter's context yet.
    """

    expected: jax.Array
    committed: jax.Array
    debt: jax.Array
    pause: jax.Array
    last_pause: jax.Array
    features_bpj: jax.Array
    pending_b: jax.Array


@struct.dataclass
class BudgetChoice:
    """Choice of one round.

    Attributes:
      index, nodes: the bucket, and its number of nodes.
      tree: draft tree of the largest bucket.
      expected: sum of the bucket's path probabilities, mean over live sequences.
      tokens: expected number of committed tokens, mean over live sequences.
      steps: time of the round, in one-token rounds.
    """

    index: jax.Array
    nodes: jax.Array
    tree: DraftTree | None
    expected: jax.Array
    tokens: jax.Array
    steps: jax.Array


def choose_bucket(
    measured: Measured, budget: Budget, tree: DraftTree, live_b: jax.Array, positions: jax.Array | int, nodes: Sequence[int]
) -> BudgetChoice:
    """Returns the bucket with the most expected tokens per second.

    Args:
      tree: draft tree of the largest bucket, in order of decreasing path probability.
      live_b: sequences that still need tokens, at least one.
      positions: cached positions that the round reads (`attention.positions_read`).
      nodes: number of nodes of each bucket, increasing.
    """
    reached_bn = jnp.cumsum(jnp.where(tree.valid_bn, jnp.exp(tree.log_prob_bn.astype(jnp.float32)), 0), axis=1)
    reached_bn = reached_bn[:, jnp.asarray(nodes) - 1]
    expected_n = jnp.sum(jnp.where(live_b[:, None], reached_bn, 0), axis=0) / jnp.maximum(jnp.sum(live_b), 1)
    tokens_n = 1 + budget.committed / budget.expected * (expected_n - 1)
    interpolate = partial(jnp.interp, jnp.asarray(positions, measured.positions_c.dtype), measured.positions_c)
    seconds_n, step = jax.vmap(interpolate, 1)(measured.round_cn), interpolate(measured.step_c)
    index = jnp.argmax(tokens_n / seconds_n).astype(jnp.int32)
    chosen_nodes = jnp.asarray(nodes, jnp.int32)[index]
    return BudgetChoice(index, chosen_nodes, tree, expected_n[index], tokens_n[index], seconds_n[index] / step)


def update_budget(budget: Budget, choice: BudgetChoice, committed_b: jax.Array, live_b: jax.Array) -> Budget:
    """Returns the budget after a drafted round: new reliability, debt and pause.

    `committed_b` counts the round's tokens, bonus included, before any cut; `live_b` marks sequences that were not done.
    """
    tokens_b = jnp.where(live_b, committed_b, 0).astype(budget.committed.dtype)  # int / int would be float64 under x64
    committed = jnp.sum(tokens_b) / jnp.maximum(jnp.sum(live_b), 1)
    loss = (choice.steps - choice.tokens).astype(budget.debt.dtype)
    debt = jnp.maximum(budget.debt + loss, 0)
    pause = jnp.maximum(jnp.ceil(loss / PROBE_SHARE), jnp.maximum(FIRST_PAUSE, 2 * budget.last_pause))
    pause = jnp.where(debt > PATIENCE, jnp.minimum(pause, LONGEST_PAUSE), 0).astype(jnp.int32)
    return budget.replace(
        expected=budget.expected + choice.expected - 1,
        committed=budget.committed + committed - 1,
        debt=jnp.minimum(debt, PATIENCE),
        pause=pause,
        last_pause=jnp.where(pause > 0, pause, jnp.where(debt > 0, budget.last_pause, 0)),
    )


@dataclass(frozen=True)
class BudgetPolicy(rounds.Policy):
    """The policy of nodes="auto"; its weights are `Measured`.

    Attributes:
      nodes: number of nodes of each bucket, root included, increasing; the last is that of the plan.
    """

    nodes: tuple[int, ...]
    PAUSES = True

    def buckets(self, plan: DecodePlan) -> tuple[int, ...]:
        return self.nodes

    def start(self, weights: Weights, state: DecodeState, plan: DecodePlan) -> Budget:
        batch, width = state.end_b.size, len(plan.taps) * plan.verifier.hidden_size
        prior = jnp.float32(PRIOR_TOKENS)
        return Budget(
            expected=prior,
            committed=prior * weights.policy.reliability,
            debt=jnp.copy(weights.policy.debt),  # the state is donated
            pause=jnp.int32(0),
            last_pause=jnp.int32(0),
            features_bpj=jnp.zeros((batch, plan.path_length, width), weights.dtype),
            pending_b=jnp.zeros(batch, jnp.int32),
        )

    def choose(self, weights: Weights, state: DecodeState, plan: DecodePlan) -> BudgetChoice:
        tree, _ = rounds.draft_tree(weights, state, plan)
        with jax.named_scope("choose"):
            positions = positions_read(plan.attention, state.capacity, jnp.max(state.cache.length_b))
            return choose_bucket(weights.policy, state.policy, tree, ~state.done_b, positions, self.nodes)

    def draft(
        self, state: DecodeState, choice: BudgetChoice, bucket: int, plan: DecodePlan
    ) -> tuple[rounds.Draft, DecodePlan]:
        return (trees.first(choice.tree, bucket), None), replace(plan, num_nodes=bucket)

    def learn(self, state: DecodeState, choice: BudgetChoice, accepted: Accepted) -> Budget:
        return update_budget(state.policy, choice, accepted.length_b, ~state.done_b)

    def is_paused(self, state: DecodeState) -> jax.Array:
        """Returns whether the next round is a one-token round."""
        return state.policy.pause > 0

    def is_full(self, state: DecodeState) -> jax.Array:
        """Returns whether the drafter must catch up before another one-token round."""
        return jnp.max(state.policy.pending_b) >= state.policy.features_bpj.shape[1]

    def one_token_round(self, weights: Weights, state: DecodeState, plan: DecodePlan) -> DecodeState:
        """Runs a one-token round of a pause; `catch_up` adds its token to the drafter's context later."""
        step_plan = replace(plan, num_nodes=1)  # still drafts, so that the pass returns features for the drafter
        tree = trees.root_only(rounds.find_anchor(state))
        verified, accepted = rounds.verify_and_accept(weights, state, tree, None, step_plan)
        after = rounds.commit_path(weights, state, verified, accepted, replace(step_plan, builder="none"), nodes=1)
        budget = state.policy
        # All live sequences have the same number of pending tokens; done sequences never draft again.
        at = jnp.max(budget.pending_b)
        features_bpj = lax.dynamic_update_slice_in_dim(budget.features_bpj, verified.features_btj, at, axis=1)
        pending_b = budget.pending_b + after.end_b - state.end_b
        return after.replace(policy=budget.replace(features_bpj=features_bpj, pending_b=pending_b, pause=budget.pause - 1))

    def catch_up(self, weights: Weights, state: DecodeState, plan: DecodePlan, is_wanted: jax.Array) -> DecodeState:
        """Adds pending tokens to the drafter's context if `is_wanted`.

        A loop of at most one iteration: a branch would copy the drafter's context.
        """
        features_bpj = state.policy.features_bpj
        first_b = state.cache.length_b - state.policy.pending_b + 1  # index of the token after the first pending position

        def extend(carry):
            drafter, pending_b = carry
            tokens_bp = trees.pick(state.tokens_bs, first_b[:, None] + jnp.arange(features_bpj.shape[1]))
            drafter = sharding.pin(drafter, drafter.axes())
            drafter = rounds.extend_drafter(weights, drafter, plan, features_bpj, tokens_bp, pending_b)
            return drafter, jnp.zeros_like(pending_b)

        with jax.named_scope("catch_up"):
            carry = state.drafter, state.policy.pending_b
            drafter, pending_b = lax.while_loop(lambda carry: is_wanted & jnp.any(carry[1] > 0), extend, carry)
        return state.replace(drafter=drafter, policy=state.policy.replace(pending_b=pending_b))
