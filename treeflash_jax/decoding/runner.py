"""What a batch calls: the programs of decoding, and how their state is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treeflash_jax import acceptance, devices, drafters, programs, trees
from treeflash_jax import mesh as meshes
from treeflash_jax.clock import Clock
from treeflash_jax.decoding import loops
from treeflash_jax.decoding.state import DecodePlan, DecodeState, Weights
from treeflash_jax.drafters.block.heads import HEADS
from treeflash_jax.trees import DraftTree

REGISTRIES = (drafters.DRAFTERS, HEADS, trees.BUILDERS, acceptance.RULES)
SHIPPED = [dict(registry) for registry in REGISTRIES]
Kept = tuple[DecodeState, int]  # an earlier state, donated, and how many tokens of the one prompt its caches keep


@dataclass(frozen=True)
class Runner:
    """Runs the compiled programs of one plan.

    Rounds of another kind (`adaptive.runner`) have a state of their own around the DecodeState, and override the methods
    that take or return a state. States are donated: what is passed in cannot be used again.

    Attributes:
      mesh: that they lie on; None for one device.
    """

    plan: DecodePlan
    weights: Weights
    mesh: Any = None

    def start(self, inputs: tuple[Any, ...], clock: Clock | None = None, kept: Kept | None = None) -> Any:
        """The state of sequences whose prompts have been read (`inputs.inputs_of`)."""
        return self.begin(self.prefill(inputs, clock, kept))

    def begin(self, decode: DecodeState) -> Any:
        """Returns the runner's state around that of sequences whose prompts have been read."""
        return decode

    def run(self, state: Any, rounds: int, enough: int, clock: Clock | None = None) -> Any:
        """The state after at most so many rounds, or after `enough` sequences are done."""
        args = jnp.int32(rounds), jnp.int32(enough)
        return self.call(loops.decode, self.weights, state, *args, clock=clock, plan=self.plan)

    def admit(self, state: Any, inputs: tuple[Any, ...], places: list[int], clock: Clock | None = None) -> Any:
        """The state with new sequences, their prompts read, in these places."""
        args = self.prefill(inputs, clock), self.places(places, inputs)
        return self.call(loops.admit, state, *args, clock=clock)

    def grow(self, state: Any, capacity: int, clock: Clock | None = None) -> Any:
        """The state with room for `capacity` positions."""
        return self.call(loops.grow, state, clock=clock, capacity=capacity)

    def inner(self, state: Any) -> DecodeState:
        """The DecodeState of a state."""
        return state

    def finish(self, state: Any, done_b: np.ndarray) -> Any:
        """The state with these sequences marked as done."""
        return state.replace(done_b=meshes.place(jnp.asarray(done_b), self.mesh))

    def nodes(self, state: Any) -> jax.Array | np.ndarray | None:
        """Nodes that every round of every sequence verified [b, s]; None where all rounds verify equally many."""
        return None

    def draft(self, inputs: tuple[Any, ...], length: int, anchor: int) -> DraftTree:
        """The tree below `anchor`, the token that follows the one prompt, of this length, in these inputs."""
        return self.call(loops.draft, self.weights, self.anchored(inputs, length, anchor), plan=self.plan)

    # What overriding methods are made of.

    def call(self, function: Any, *args: Any, clock: Clock | None = None, **static: Any) -> Any:
        is_kept = [dict(registry) for registry in REGISTRIES] == SHIPPED  # no source is known of kinds that users add
        return programs.call(function, *args, mesh=self.mesh, clock=clock, is_kept=is_kept, **static)

    def prefill(
        self,
        inputs: tuple[Any, ...],
        clock: Clock | None = None,
        kept: Kept | None = None,
        first_b: jax.Array | None = None,
    ) -> DecodeState:
        """Reads prompts, a few chunks per dispatch: in between, the clock reports and Ctrl-C is heeded."""
        tokens_bs, length_b, _ = inputs
        clock = clock or Clock()
        plan, capacity, count = self.plan.for_prefill(), tokens_bs.shape[1], 0
        earlier: tuple[Any, ...] = ()
        if kept is not None:
            state, count = kept
            if state.capacity < capacity:
                state = self.call(loops.grow, state, clock=clock, capacity=capacity)
            earlier = state, meshes.place(jnp.full(length_b.shape, count, jnp.int32), self.mesh)
        dtype = self.weights.verifier["embed"].dtype
        state = self.call(loops.begin, *inputs, *earlier, clock=clock, plan=plan, dtype=dtype)
        longest, chunks = int(np.max(meshes.to_host(length_b))), devices.of_mesh(self.mesh).prefill_chunks
        for _ in clock.reading(range(count, longest, chunks * plan.chunk(capacity)), longest):
            args = state, length_b, jnp.int32(chunks), first_b
            state = jax.block_until_ready(self.call(loops.read, self.weights, *args, clock=clock, plan=plan))
        return state

    def anchored(self, inputs: tuple[Any, ...], length: int, anchor: int) -> DecodeState:
        """The state of the one prompt, of this length, in these inputs, followed by `anchor`."""
        if drafters.of(self.plan.drafter).READS_TOKENS:  # and has to be shown this one
            first_b = meshes.place(jnp.full(inputs[1].shape, anchor, jnp.int32), self.mesh)
            return self.prefill(inputs, first_b=first_b)
        state = self.prefill(inputs)
        return state.replace(tokens_bs=state.tokens_bs.at[0, length].set(anchor))

    def places(self, places: list[int], inputs: tuple[Any, ...]) -> jax.Array:
        """Where the sequences of the inputs go, on every device; -1 ends the list."""
        size = inputs[1].size
        places_a = np.array(places + [-1] * (size - len(places)), np.int32)
        return meshes.place(jnp.asarray(places_a), self.mesh, by_rows=False)
