"""Decoding whose rounds choose how many nodes they verify, as a batch calls it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treeflash_jax import mesh as meshes
from treeflash_jax.adaptive import budget as budgets
from treeflash_jax.adaptive.calibration import Calibration, Decision
from treeflash_jax.clock import Clock
from treeflash_jax.decoding.runner import Runner
from treeflash_jax.decoding.state import DecodeState


@dataclass(frozen=True)
class AdaptiveRunner(Runner):
    """Runs rounds that choose among the buckets of a decision.

    Attributes:
      decision: from a calibration.
    """

    decision: Decision | None = None

    def start(self, inputs: tuple[Any, ...], clock: Clock | None = None) -> DecodeState:
        return self.begin(self.prefill(inputs, clock))

    def begin(self, state: DecodeState) -> DecodeState:
        """The state with a fresh budget, in place on the mesh."""
        times = budgets.RoundTimes(
            positions_c=np.array(self.decision.positions, np.float32),
            round_cn=np.array(self.decision.round_seconds, np.float32),
            step_c=np.array(self.decision.step_seconds, np.float32),
        )
        dtype = self.weights.verifier["embed"].dtype
        budget = budgets.start(
            meshes.place(jax.tree.map(jnp.asarray, times), self.mesh, by_rows=False),
            reliability=self.decision.reliability,
            debt=self.decision.debt,
            batch=state.end_b.size,
            capacity=state.capacity,
            pending=self.plan.path_rows,
            features=len(self.plan.taps) * self.plan.verifier.hidden_size,
            dtype=dtype,
        )
        budget = meshes.place(budget.replace(times=None), self.mesh).replace(times=budget.times)
        return state.replace(budget=budget)

    def nodes(self, state: DecodeState) -> jax.Array:
        return state.budget.nodes_bs


class NeverDrafts(Runner):
    """One-token decoding in place of rounds that would choose, where drafting cannot pay."""

    def nodes(self, state: DecodeState) -> np.ndarray:
        return np.ones(state.accepted_bs.shape, np.int32)


def choosing(
    runner: Runner, found: Calibration, *, batch: int, positions: int, temperatures: Sequence[float]
) -> AdaptiveRunner | NeverDrafts:
    """What decodes a batch whose rounds choose their nodes.

    Args:
      runner: of rounds that verify the largest trees of the calibration.
      found: what was measured for this pair and these draft settings.
      batch: sequences decoded together, padding included.
      positions: of their caches.
      temperatures: of the sequences.
    """
    decision = found.decide(batch, positions, temperatures)
    plan, weights, mesh = runner.plan, runner.weights, runner.mesh
    if not decision.buckets:
        return NeverDrafts(plan.one_token(), weights, mesh)
    plan = replace(plan, num_nodes=decision.buckets[-1], buckets=decision.buckets)
    return AdaptiveRunner(plan, weights, mesh, decision)
