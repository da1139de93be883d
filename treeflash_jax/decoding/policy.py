"""Policies choose the size of each round's tree on the device.

A policy is static and part of the plan (`DecodePlan.policy`); its state is part of the loop carry (`DecodeState.policy`),
and its measurements or network are `Weights.policy`. There are two: `budget.BudgetPolicy` (nodes="auto") and
`selector_policy.SelectorPolicy` (a trained selector of delayed trees). Without a policy, all rounds have equal shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from treeflash_jax.decoding.accepting import Accepted
from treeflash_jax.decoding.rounds import Verified
from treeflash_jax.decoding.state import DecodePlan, DecodeState, Weights
from treeflash_jax.trees import DraftTree, Proposal


class Policy(Protocol):
    """Chooses one of a few buckets (sizes of tree) for every round; hashable.

    The distribution of answers must not depend on the choice: it may be a function of the text, draft distributions and
    earlier rounds, but never of the round's random numbers.

    Attributes:
      PAUSES: whether drafting can pause. Such a policy also has `is_paused`, `is_full`, `one_token_round` and `catch_up`
        (see `budget.BudgetPolicy`).
    """

    PAUSES: bool

    def buckets(self, plan: DecodePlan) -> Sequence[Any]:
        """Returns the buckets, each a branch of a round; the last has the largest tree."""

    def start(self, weights: Weights, state: DecodeState, plan: DecodePlan) -> Any:
        """Returns the policy's state: scalars, and arrays whose first axis is the batch; zeros for a new sequence."""

    def choose(self, weights: Weights, state: DecodeState, plan: DecodePlan) -> Any:
        """Drafts, and returns a choice: `index` of the bucket, and `nodes` verified, a scalar or one per sequence."""

    def draft(
        self, state: DecodeState, choice: Any, bucket: Any, plan: DecodePlan
    ) -> tuple[DraftTree, Proposal | None, DecodePlan]:
        """Returns the tree of a bucket, the distribution it was drawn from, if any, and the bucket's plan."""

    def observe(self, state: DecodeState, proposal: Proposal | None, verified: Verified, accepted: Accepted) -> Any:
        """Returns the input of `learn` from a verified tree, with the same shapes for all buckets."""

    def learn(self, state: DecodeState, choice: Any, accepted: Accepted, observed: Any) -> Any:
        """Returns the policy's state after a round; `state` is the decode state before it."""
