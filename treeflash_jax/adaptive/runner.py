"""Adaptive decoding as a batch calls it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treeflash_jax import mesh as meshes
from treeflash_jax.adaptive import budget as budgets
from treeflash_jax.adaptive import loops
from treeflash_jax.adaptive.calibration import Calibration, Decision
from treeflash_jax.adaptive.state import AdaptivePlan, AdaptiveState
from treeflash_jax.clock import Clock
from treeflash_jax.decoding.runner import Runner
from treeflash_jax.decoding.state import DecodeState


@dataclass(frozen=True, kw_only=True)
class AdaptiveRunner(Runner):
    """Runs rounds that choose among the buckets of a decision."""

    decision: Decision

    @property
    def adaptive(self) -> AdaptivePlan:
        return AdaptivePlan(base=self.plan, buckets=self.decision.buckets)

    def begin(self, decode: DecodeState) -> AdaptiveState:
        """Returns the state with a fresh budget, in place on the mesh."""
        times = budgets.RoundTimes(
            positions_c=np.array(self.decision.positions, np.float32),
            round_cn=np.array(self.decision.round_seconds, np.float32),
            step_c=np.array(self.decision.step_seconds, np.float32),
        )
        budget = budgets.start(
            meshes.place(jax.tree.map(jnp.asarray, times), self.mesh, by_rows=False),
            reliability=self.decision.reliability,
            debt=self.decision.debt,
            batch=decode.end_b.size,
            capacity=decode.capacity,
            pending=self.plan.path_rows,
            features=len(self.plan.taps) * self.plan.verifier.hidden_size,
            dtype=self.weights.verifier["embed"].dtype,
        )
        budget = meshes.place(budget.replace(times=None), self.mesh).replace(times=budget.times)
        return AdaptiveState(decode, budget)

    def run(self, state: AdaptiveState, rounds: int, enough: int, clock: Clock | None = None) -> AdaptiveState:
        args = jnp.int32(rounds), jnp.int32(enough)
        return self.call(loops.decode, self.weights, state, *args, clock=clock, plan=self.adaptive)

    def admit(
        self, state: AdaptiveState, inputs: tuple[Any, ...], places: list[int], clock: Clock | None = None
    ) -> AdaptiveState:
        args = self.prefill(inputs, clock), self.places(places, inputs)
        return self.call(loops.admit, self.weights, state, *args, clock=clock, plan=self.adaptive)

    def grow(self, state: AdaptiveState, capacity: int, clock: Clock | None = None) -> AdaptiveState:
        return self.call(loops.grow, state, clock=clock, capacity=capacity)

    def inner(self, state: AdaptiveState) -> DecodeState:
        return state.decode

    def finish(self, state: AdaptiveState, done_b: np.ndarray) -> AdaptiveState:
        return state.replace(decode=super().finish(state.decode, done_b))

    def nodes(self, state: AdaptiveState) -> jax.Array:
        return state.budget.nodes_bs


class NeverDrafts(Runner):
    """One-token decoding in place of adaptive decoding, where drafting cannot pay."""

    def nodes(self, state: DecodeState) -> np.ndarray:
        return np.ones(state.accepted_bs.shape, np.int32)


def choosing(
    runner: Runner, found: Calibration, *, batch: int, positions: int, temperatures: Sequence[float]
) -> AdaptiveRunner | NeverDrafts:
    """What decodes a batch adaptively.

    Args:
      runner: of rounds that verify the largest trees of the calibration.
      found: what was measured for this pair and these draft settings.
      batch: sequences decoded together, padding included.
    """
    decision = found.decide(batch, positions, temperatures)
    if not decision.buckets:
        return NeverDrafts(runner.plan.one_token(), runner.weights, runner.mesh)
    plan = replace(runner.plan, num_nodes=decision.buckets[-1])
    return AdaptiveRunner(plan=plan, weights=runner.weights, mesh=runner.mesh, decision=decision)
