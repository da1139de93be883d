"""Policies: what varies from round to round, a size of tree chosen on the device.

A policy is static and part of the plan (`DecodePlan.policy`); its state is part of the loop carry (`DecodeState.policy`),
and the values that it chooses by are weights (`Weights.policy`). There are two: `budget.BudgetPolicy` (nodes="auto") and
`selection.SelectorPolicy` (a trained selector of delayed trees). Without a policy all rounds of a plan are alike.
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

    The distribution of answers must not depend on the choice: it may look at the text, at draft distributions and at
    earlier rounds, but never at the random numbers of the round.

    Attributes:
      PAUSES: whether drafting can pause. Such a policy also has `is_paused`, `is_full`, `one_token_round` and `catch_up`
        (see `budget.BudgetPolicy`).
    """

    PAUSES: bool

    def buckets(self, plan: DecodePlan) -> Sequence[Any]:
        """Returns the buckets; every one of them is a branch of a round. The last has the largest tree."""

    def start(self, weights: Weights, state: DecodeState, plan: DecodePlan) -> Any:
        """Returns the policy's state: scalars, and arrays whose first axis is the batch; zeros for a new sequence."""

    def choose(self, weights: Weights, state: DecodeState, plan: DecodePlan) -> Any:
        """Drafts, and returns a choice: `index` of the round's bucket, and `nodes` verified, of all sequences or each."""

    def draft(
        self, state: DecodeState, choice: Any, bucket: Any, plan: DecodePlan
    ) -> tuple[DraftTree, Proposal | None, DecodePlan]:
        """Returns the tree of a bucket, the distribution that it was drawn from if it was, and the bucket's own plan."""

    def observe(self, state: DecodeState, proposal: Proposal | None, verified: Verified, accepted: Accepted) -> Any:
        """Returns what `learn` needs of a verified tree, in shapes that are the same for all buckets."""

    def learn(self, state: DecodeState, choice: Any, accepted: Accepted, observed: Any) -> Any:
        """Returns the policy's state after a round; `state` is that before it."""
