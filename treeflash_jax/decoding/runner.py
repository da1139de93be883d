"""Calls of the compiled decoding programs for one batch.

Shape suffixes: b batch, s token slots, a admitted sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treeflash_jax import acceptance, drafters, trees
from treeflash_jax.core import devices, programs, sharding
from treeflash_jax.core.clock import Clock
from treeflash_jax.decoding import loops
from treeflash_jax.decoding.budget import BudgetPolicy
from treeflash_jax.decoding.calibration import Calibration
from treeflash_jax.decoding.state import DecodePlan, DecodeState, Weights
from treeflash_jax.trees import DraftTree

REGISTRIES = (*drafters.REGISTRIES, trees.BUILDERS, acceptance.RULES)
SHIPPED = [dict(registry) for registry in REGISTRIES]  # programs of others are not kept: keys cover this package only
Kept = tuple[DecodeState, int]  # an earlier state, donated, and the number of positions to keep in its caches


@dataclass(frozen=True)
class Runner:
    """Runs the compiled programs of one plan. States are donated: a state that was passed in cannot be used again.

    Attributes:
      mesh: mesh of weights and states; None for one device.
      reports_nodes: whether `nodes` returns ones instead of None for a plan without a policy.
    """

    plan: DecodePlan
    weights: Weights
    mesh: Any = None
    policy_weights: Any = None
    reports_nodes: bool = False

    @property
    def all_weights(self) -> Weights:
        return self.weights.replace(policy=self.policy_weights)

    def start(self, inputs: tuple[Any, ...], clock: Clock | None = None, kept: Kept | None = None) -> DecodeState:
        """Returns the state of sequences whose prompts have been read (`engine.inputs`)."""
        return self.begin(self.prefill(inputs, clock, kept))

    def begin(self, state: DecodeState) -> DecodeState:
        """Returns a state after `prefill` with the initial state of the plan's policy."""
        if self.plan.policy is None:
            return state
        fresh = self.plan.policy.start(self.all_weights, state, self.plan), jnp.zeros(state.accepted_bs.shape, jnp.int32)
        policy, nodes_bs = sharding.place(fresh, self.mesh)
        return state.replace(policy=policy, nodes_bs=nodes_bs)

    def run(self, state: DecodeState, rounds: int, enough: int, clock: Clock | None = None) -> DecodeState:
        """Returns the state after `rounds` rounds, or once `enough` sequences are done."""
        args = jax.device_put((np.int32(rounds), np.int32(enough)))
        return self.call(loops.decode, self.all_weights, state, *args, clock=clock, plan=self.plan)

    def admit(
        self, state: DecodeState, inputs: tuple[Any, ...], slots: list[int], clock: Clock | None = None
    ) -> DecodeState:
        """Returns the state with done sequences, at these batch indices, replaced by new ones after prefill."""
        fresh, size = self.prefill(inputs, clock), inputs[1].size
        if self.plan.policy is not None and self.plan.policy.PAUSES:
            state = self.call(loops.catch_up, self.all_weights, state, clock=clock, plan=self.plan)
        slots_a = jnp.asarray(np.array(slots + [-1] * (size - len(slots)), np.int32))
        return self.call(loops.admit, state, fresh, sharding.place(slots_a, self.mesh, over_batch=False), clock=clock)

    def grow(self, state: DecodeState, capacity: int, clock: Clock | None = None) -> DecodeState:
        return self.call(loops.grow, state, clock=clock, capacity=capacity)

    def nodes(self, state: DecodeState) -> jax.Array | np.ndarray | None:
        """Returns the number of nodes verified per sequence and round [b, s]; None if it is always the plan's."""
        return np.ones(state.accepted_bs.shape, np.int32) if self.reports_nodes else state.nodes_bs

    def draft(self, inputs: tuple[Any, ...], length: int, anchor: int) -> DraftTree:
        """Returns the tree below `anchor`, the token that follows the inputs' only prompt, which has `length` tokens."""
        if drafters.of(self.plan.drafter).READS_TOKENS:  # the drafter must read the anchor, too
            first_b = sharding.place(jnp.full(inputs[1].shape, anchor, jnp.int32), self.mesh)
            state = self.prefill(inputs, first_b=first_b)
        else:  # by the program that reads any prompt
            state = self.prefill(inputs)
            state = state.replace(tokens_bs=state.tokens_bs.at[0, length].set(anchor))
        return self.call(loops.draft, self.all_weights, self.begin(state), plan=self.plan)

    def call(self, function: Any, *args: Any, clock: Clock | None = None, **static: Any) -> Any:
        is_kept = [dict(registry) for registry in REGISTRIES] == SHIPPED
        return programs.call(function, *args, mesh=self.mesh, clock=clock, is_kept=is_kept, **static)

    def prefill(
        self,
        inputs: tuple[Any, ...],
        clock: Clock | None = None,
        kept: Kept | None = None,
        first_b: jax.Array | None = None,
    ) -> DecodeState:
        """Reads prompts, a few chunks per dispatch, so that progress is logged and Ctrl-C works in between."""
        tokens_bs, length_b, _ = inputs
        clock = clock or Clock()
        plan, capacity, count = self.plan.for_prefill(), tokens_bs.shape[1], 0
        earlier: tuple[Any, ...] = ()
        if kept is not None:
            state, count = kept[0].replace(policy=None, nodes_bs=None), kept[1]
            if state.capacity < capacity:
                state = self.call(loops.grow, state, clock=clock, capacity=capacity)
            earlier = state, sharding.place(jnp.full(length_b.shape, count, jnp.int32), self.mesh)
        dtype = self.weights.verifier["embed"].dtype
        state = self.call(loops.begin, *inputs, *earlier, clock=clock, plan=plan, dtype=dtype)
        longest, chunks = int(np.max(sharding.to_host(length_b))), devices.describe_mesh(self.mesh).prefill_chunks
        for _ in clock.reading(range(count, longest, chunks * plan.chunk(capacity)), longest):
            args = state, length_b, jax.device_put(np.int32(chunks)), first_b
            state = jax.block_until_ready(self.call(loops.read, self.weights, *args, clock=clock, plan=plan))
        return state


def make_calibrated_runner(
    runner: Runner, calibration: Calibration, *, batch: int, positions: int, temperatures: Sequence[float]
) -> Runner:
    """Returns a runner with nodes="auto", or of one-token decoding if drafting cannot pay.

    Args:
      runner: runner whose plan has the calibration's largest tree.
      calibration: measurements of this pair with these draft settings.
      batch: number of sequences decoded together, padding included.
      positions, temperatures: see `Calibration.decide`.
    """
    decision = calibration.decide(batch, positions, temperatures)
    if not decision.nodes:
        return replace(runner, plan=runner.plan.one_token(), reports_nodes=True)
    plan = replace(runner.plan, num_nodes=decision.nodes[-1], policy=BudgetPolicy(decision.nodes))
    measured = sharding.place(jax.tree.map(jnp.float32, decision.measured), runner.mesh, over_batch=False)
    return replace(runner, plan=plan, policy_weights=measured)
