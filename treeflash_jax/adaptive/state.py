"""What adaptive decoding is planned as, and what its rounds hand on: the plan and state of decoding, with a budget."""

from __future__ import annotations

from dataclasses import dataclass

from flax import struct

from treeflash_jax.adaptive import budget as budgets
from treeflash_jax.adaptive.budget import Budget
from treeflash_jax.decoding import state as decoding
from treeflash_jax.decoding.state import DecodePlan, DecodeState


@dataclass(frozen=True, kw_only=True)
class AdaptivePlan:
    """Everything that shapes the compiled program; two equal plans share it.

    Attributes:
      base: of a round that verifies the whole tree.
      buckets: nodes that a round may verify, root included, increasing; at most those of the base.
    """

    base: DecodePlan
    buckets: tuple[int, ...]


@struct.dataclass
class AdaptiveState:
    """The loop carry."""

    decode: DecodeState
    budget: Budget


def pin(state: AdaptiveState) -> AdaptiveState:
    """Constrains the whole state to its layout on the ambient mesh."""
    return AdaptiveState(decoding.pin(state.decode), budgets.pin(state.budget))
