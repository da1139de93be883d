"""Sequences decoded together in a fixed number of slots.

The number of slots never changes, so that programs are compiled once. When enough sequences have finished, a group of
waiting requests is prefilled in a smaller batch and moved into their slots ("continuous batching").

Shape suffixes: b batch, a admitted sequences.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from treeflash_jax.core import sharding
from treeflash_jax.decoding import loops
from treeflash_jax.decoding.automaton import Automaton
from treeflash_jax.decoding.state import DecodeState
from treeflash_jax.engine.call.requests import Request
from treeflash_jax.engine.schedule.admission import Admission, PrefillGroup
from treeflash_jax.engine.schedule.batching import Batch, SamplingSizes, make_batch
from treeflash_jax.engine.schedule.prefill import Prefill, PrefixCaches
from treeflash_jax.engine.schedule.runner import Runner
from treeflash_jax.engine.schedule.slots import Slots

FindStopped = Callable[[list[int]], list[int]]


class Scheduler(ABC):
    """Decodes requests in the slots of one batch, by the compiled programs of one plan.

    `step` reads prompts or runs rounds. The caller then reads the answers of finished slots from `state`, and releases the
    slots. Subclasses say when prompts are read: `CallScheduler` and `OpenScheduler`.

    Args:
      sizes: sizes of the requests' sampling settings.

    Attributes:
      state: decoding state, donated to programs that return it; None before the first prompts are read.
      num_reused: number of prompt tokens of each slot that were reused from caches.
      is_interrupted: whether Ctrl-C ended the decoding.
    """

    def __init__(self, runner: Runner, sizes: SamplingSizes, *, batch_size: int = 1):
        self.runner, self.sizes = runner, sizes
        self.slots = Slots(sharding.pad_batch_size(batch_size, runner.mesh))
        self.admission = Admission(self.slots, runner.mesh)
        self.state: DecodeState | None = None
        self.num_reused = np.zeros(self.slots.size, int)
        self.is_interrupted = False

    @property
    def is_lost(self) -> bool:
        """True if no state can be read: there is none yet, or an interrupt came after the old state was donated."""
        return self.state is None or self.state.end_b.is_deleted()

    @property
    def has_work(self) -> bool:
        """True if a request waits or has a slot."""
        return bool(self.admission.waiting) or len(self.slots.free) < self.slots.size

    def step(self, max_rounds: int, find_stopped: FindStopped = lambda slots: []) -> list[int]:
        """Reads prompts or runs up to `max_rounds` rounds; returns the slots of finished answers.

        Args:
          find_stopped: function that returns, of some slots, those whose answers contain a stop string.
        """
        self._advance(max_rounds)
        done_b = sharding.to_host(self.state.done_b)
        finished = [slot for slot in sorted(self.slots.requests) if done_b[slot]]
        stopped = find_stopped([slot for slot in sorted(self.slots.requests) if slot not in finished])
        if stopped:
            self.end(stopped)
        return sorted(finished + stopped)

    def end(self, slots: Sequence[int]) -> None:
        """Marks sequences as done, so that rounds no longer wait for them."""
        done_b = sharding.to_host(self.state.done_b).copy()
        done_b[[*slots]] = True
        self.state = self.state.replace(done_b=sharding.place(jnp.asarray(done_b), self.runner.mesh))

    def decode_all(self, max_rounds: int, find_stopped: FindStopped) -> Iterator[list[int]]:
        """Decodes all requests; yields the slots of finished answers after every `step`, then releases them.

        After Ctrl-C, it yields the slots of all unfinished answers if the state can still be read.
        """
        try:
            while self.has_work:
                finished = self.step(max_rounds, find_stopped)
                yield finished
                self.slots.release(finished)
        except KeyboardInterrupt:
            if self.is_lost:
                raise
            self.is_interrupted = True
            yield sorted(self.slots.requests)

    @abstractmethod
    def _advance(self, max_rounds: int) -> None:
        """Reads prompts, runs rounds, or does a part of both."""

    def _begin_prefill(
        self, group: PrefillGroup, capacity: int, prefixes: PrefixCaches | None = None, *, will_decode: bool = False
    ) -> None:
        batch = self._make_batch(group.row_requests(), capacity)
        group.prefill = Prefill(self.runner, batch, prefixes, will_decode=will_decode, scores=group.scores)

    def _admit(self, group: PrefillGroup) -> None:
        """Moves the sequences of a group into its slots. Without a running batch, they become the batch."""
        if self.state is None:
            self.state = group.prefill.state
        else:
            slots = [slot if slot in group.requests else -1 for slot in group.rows]
            slots_a = sharding.place(jnp.asarray(slots, jnp.int32), self.runner.mesh, over_batch=False)
            self.state = self.runner.call(loops.admit, self.state, group.prefill.state, slots_a)
        for row, slot in enumerate(group.rows):
            if slot in group.requests:
                self.slots.hold(slot, group.requests[slot])
                self.num_reused[slot] = group.prefill.num_reused_b[row]

    def _run_rounds(self, max_rounds: int) -> None:
        """Runs rounds until enough sequences are done. First doubles caches that have no room for a round."""
        if np.max(sharding.to_host(self.state.end_b)) + self.runner.plan.path_length > self.state.capacity:
            self._grow(2 * self.state.capacity)
        self.state = self._decode(self.state, max_rounds)

    def _decode(self, state: DecodeState, max_rounds: int) -> DecodeState:
        limits = jax.device_put((np.int32(max_rounds), np.int32(self.admission.enough_done)))
        return self.runner.call(loops.decode, self.runner.weights, state, *limits, plan=self.runner.plan)

    def _grow(self, capacity: int) -> None:
        if self.state.capacity < capacity:
            self.state = self.runner.call(loops.grow_caches, self.state, capacity=capacity)

    def _make_batch(self, rows: Sequence[Request | None], capacity: int, automaton: Automaton | None = None) -> Batch:
        """Pads the requests of rows into device arrays. Automata that are given replace those of the requests."""
        runner = self.runner
        return make_batch(
            rows,
            self.sizes,
            capacity=capacity,
            dtype=runner.weights.dtype,
            mesh=runner.mesh,
            clock=runner.clock,
            automaton=automaton,
        )
