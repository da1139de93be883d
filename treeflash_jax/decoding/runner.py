"""Calls of the compiled decoding programs for one batch.

Shape suffixes: b batch, s token slots, a admitted sequences.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treeflash_jax.core import programs, sharding
from treeflash_jax.core.clock import Clock
from treeflash_jax.decoding import loops
from treeflash_jax.decoding.state import DecodePlan, DecodeState, Weights
from treeflash_jax.trees import DraftTree

Kept = tuple[DecodeState, int]  # an earlier state, donated, and the number of positions to keep in its caches


@dataclass(frozen=True)
class Runner:
    """Runs the compiled programs of one plan. States are donated: a state that was passed in cannot be used again.

    Prompts and settings come as `engine.batching.Batch`.

    Attributes:
      mesh: mesh of weights and states; None for one device.
      clock: counts compilation and announces what takes long.
    """

    plan: DecodePlan
    weights: Weights
    mesh: Any = None
    clock: Clock = field(default_factory=Clock)

    def start(self, batch: tuple[Any, ...], kept: Kept | None = None) -> DecodeState:
        """Returns the state after prefill of a batch that will be decoded."""
        return self.prefill(batch, kept, will_run=True)

    def run(self, state: DecodeState, rounds: int, enough: int) -> DecodeState:
        """Returns the state after `rounds` rounds, or once `enough` sequences are done."""
        args = jax.device_put((np.int32(rounds), np.int32(enough)))
        return self.call(loops.decode, self.weights, state, *args, plan=self.plan)

    def admit(self, state: DecodeState, batch: tuple[Any, ...], slots: list[int]) -> DecodeState:
        """Returns the state with done sequences, at these batch indices, replaced by new ones after prefill."""
        fresh, size = self.prefill(batch), batch[1].size
        slots_a = jnp.asarray(np.array(slots + [-1] * (size - len(slots)), np.int32))
        return self.call(loops.admit, state, fresh, sharding.place(slots_a, self.mesh, over_batch=False))

    def grow(self, state: DecodeState, capacity: int) -> DecodeState:
        return self.call(loops.grow, state, capacity=capacity)

    def draft(self, batch: tuple[Any, ...], length: int, anchor: int) -> DraftTree:
        """Returns the tree below `anchor`, the token that follows the batch's only prompt, which has `length` tokens."""
        if self.plan.drafter.reads_tokens:  # the drafter must read the anchor, too
            first_b = sharding.place(jnp.full(batch[1].shape, anchor, jnp.int32), self.mesh)
            state = self.prefill(batch, first_b=first_b)
        else:  # by the program that reads any prompt
            state = self.prefill(batch)
            state = state.replace(tokens_bs=state.tokens_bs.at[0, length].set(anchor))
        return self.call(loops.draft, self.weights, state, plan=self.plan)

    def call(self, function: Any, *args: Any, **static: Any) -> Any:
        return programs.call(function, *args, mesh=self.mesh, clock=self.clock, **static)

    def prefill(
        self, batch: tuple[Any, ...], kept: Kept | None = None, first_b: jax.Array | None = None, will_run: bool = False
    ) -> DecodeState:
        """Reads prompts, a few chunks per dispatch, so that progress is logged and Ctrl-C works in between.

        With `will_run`, the program of `run` is compiled at the same time.
        """
        tokens_bs, length_b, _ = batch
        plan, capacity, count = self.plan.for_prefill(), tokens_bs.shape[1], 0
        earlier: tuple[Any, ...] = None, None
        if kept is not None:
            state, count = kept
            if state.capacity < capacity:
                state = self.grow(state, capacity)
            earlier = state, sharding.place(jnp.full(length_b.shape, count, jnp.int32), self.mesh)
        state = self.call(loops.begin, *batch, *earlier, self.weights.processor, plan=plan, dtype=self.weights.dtype)
        longest, passes = int(np.max(sharding.to_host(length_b))), jax.device_put(np.int32(plan.prefill_passes))
        if will_run:  # XLA compiles the first, or reads it from JAX's cache, while Python traces the second
            where = {"mesh": self.mesh, "clock": self.clock}
            programs.prepare(loops.read, self.weights, state, length_b, passes, first_b, plan=plan, **where)
            programs.prepare(loops.decode, self.weights, state, passes, passes, plan=self.plan, **where)
        for _ in self.clock.reading(range(count, longest, plan.prefill_passes * plan.chunk(capacity)), longest):
            state = self.call(loops.read, self.weights, state, length_b, passes, first_b, plan=plan)
            jax.block_until_ready(state)
        return state
