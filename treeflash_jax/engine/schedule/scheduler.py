"""Sequences decoded together in a fixed number of slots.

The number of slots never changes, so that programs are compiled once. When enough sequences have finished, a group of
waiting requests is prefilled in a smaller batch and moved into their slots ("continuous batching").

Shape suffixes: b batch, a admitted sequences.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from treeflash_jax.core import sharding
from treeflash_jax.decoding import loops
from treeflash_jax.decoding.automaton import Automaton
from treeflash_jax.decoding.state import DecodeState
from treeflash_jax.engine.call.requests import Request
from treeflash_jax.engine.schedule.admission import Admission, PrefillGroup
from treeflash_jax.engine.schedule.batching import Batch, SamplingSizes, first_capacity, make_batch
from treeflash_jax.engine.schedule.prefill import Prefill, PrefixCaches
from treeflash_jax.engine.schedule.prefixes import copy_prefixes
from treeflash_jax.engine.schedule.runner import Runner
from treeflash_jax.engine.schedule.session import Session
from treeflash_jax.engine.schedule.slots import Slots

FindStopped = Callable[[list[int]], list[int]]


class Scheduler:
    """Decodes requests in the slots of one batch, by the compiled programs of one plan.

    `submit` takes requests at any time. `step` reads a part of the admitted prompts, or runs rounds. The caller then reads
    the answers of finished slots from `state`, and releases the slots.

    Args:
      sizes: sizes of the requests' sampling settings.
      capacity: capacity of the caches, large enough for every request; None: large enough for the prompts, and doubled when
        an answer outgrows it.
      is_open: whether requests keep coming, as in a server. If so, prompts continue from the caches of any slot, a chunk of
        a prompt alternates with a round of the running answers, and rounds of answers without constraints run a program
        without automata. If not, throughput comes first: an empty batch is filled at once, and rounds wait for prompts.

    Attributes:
      state: decoding state, donated to programs that return it; None before the first prompts are read.
      num_reused: number of prompt tokens of each slot that were reused from caches.
      is_interrupted: whether Ctrl-C ended the decoding.
    """

    def __init__(
        self,
        runner: Runner,
        sizes: SamplingSizes,
        *,
        batch_size: int = 1,
        capacity: int | None = None,
        is_open: bool = False,
    ):
        self.runner, self.sizes, self.is_open = runner, sizes, is_open
        self.slots = Slots(sharding.pad_batch_size(batch_size, runner.mesh))
        self.admission = Admission(self.slots, runner.mesh)
        self.state: DecodeState | None = None
        self.num_reused = np.zeros(self.slots.size, int)
        self.is_interrupted = False
        self._has_fixed_capacity = capacity is not None
        self._capacity = capacity or 0
        self._session_caches: PrefixCaches | None = None  # caches of a session, for the first prompt
        self._group: PrefillGroup | None = None  # group whose prompts are being read
        self._allow_all: dict[int, Automaton] = {}  # automata that allow everything, by number of rows

    @property
    def is_lost(self) -> bool:
        """True if no state can be read: there is none yet, or an interrupt came after the old state was donated."""
        return self.state is None or self.state.end_b.is_deleted()

    @property
    def has_work(self) -> bool:
        return bool(self.admission.waiting or self.slots.requests or self._group)

    def submit(self, requests: Sequence[Request], session: Session | None = None) -> None:
        """Queues requests; those without a free slot wait for one.

        Args:
          session: session from whose caches the only request continues. The caches move to the scheduler.
        """
        if not self._has_fixed_capacity:
            self._capacity = max(self._capacity, first_capacity(self.runner.plan, requests))
        if session is not None:
            self._session_caches = session.take_caches(self.runner, requests[0], self._capacity)
            self._capacity = self._session_caches.capacity if self._session_caches else self._capacity
        self.admission.add(requests)

    def cancel(self, request: Request) -> None:
        """Drops a request of an open scheduler in any phase: waiting, reading of its prompt, or decoding."""
        self.admission.remove(request)
        decoding = [slot for slot, other in self.slots.requests.items() if other is request]
        if decoding:
            self.end(decoding)
        group_requests = self._group.requests if self._group else {}
        prefilling = [slot for slot, other in group_requests.items() if other is request]
        for slot in prefilling:
            del group_requests[slot]
        if not group_requests:
            self._group = None
        self.slots.release(decoding + prefilling)

    def recover(self) -> list[Request]:
        """Drops the state after a failed dispatch and frees all slots; returns the requests whose answers are lost."""
        lost = {**self.slots.requests, **(self._group.requests if self._group else {})}
        self.state = self._group = None
        self.slots.release([*lost])
        return [*lost.values()]

    def step(self, max_rounds: int, find_stopped: FindStopped = lambda slots: []) -> list[int]:
        """Reads prompts, runs up to `max_rounds` rounds, or reads a chunk and runs one round.

        Returns the slots of finished answers.

        Args:
          find_stopped: function that returns, of some slots, those whose answers contain a stop string.
        """
        alternates = self.is_open and bool(self.slots.requests)
        if self.state is None and self.is_open:
            self.state = self._empty_state()
        is_reading = self._read_prompts(1 if alternates else self.runner.plan.shared.prefill_passes)
        if alternates or not is_reading:
            self._run_rounds(1 if is_reading else max_rounds)
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

    def compile_programs(self) -> None:
        """Compiles the programs of the submitted requests without decoding, except those for larger caches."""
        passes = self.runner.plan.shared.prefill_passes
        self._read_prompts(passes)
        self._run_rounds(0)
        if self.admission.waiting:
            self.slots.release(sorted(self.slots.requests)[: self.admission.refill_size])
            self._read_prompts(passes)

    def _read_prompts(self, passes: int) -> bool:
        """Reads prompts of the next group, which gets its slots after the last chunk. Returns False if no group is due.

        Args:
          passes: number of chunks to read if the scheduler is open; otherwise whole prompts are read.
        """
        if self._group is None:
            self._begin_group()
        if self._group is None:
            return False
        prefill = self._group.prefill
        if self.is_open:
            prefill.read(passes)
        else:
            prefill.read_all()
        if prefill.is_complete:
            self._admit(self._group)
            self._group = None
        return True

    def _begin_group(self) -> None:
        """Makes a group of the next requests, if any are admitted now."""
        waiting = self.admission.waiting
        fills_batch = not self.slots.requests and len(waiting) >= self.slots.size and not self.is_open
        if waiting and (self.state is None or fills_batch):
            self._fill_batch()
        elif self.admission.is_refill_due:
            self._refill()

    def _fill_batch(self) -> None:
        """Begins a group for an empty batch: it has a row per slot, and its state becomes the state of the batch."""
        prefixes, self._session_caches = self._session_caches, None
        if self.state is not None:
            self._capacity = max(self._capacity, self.state.capacity)
            self.state = None  # frees its caches
        count = min(self.slots.size, len(self.admission.waiting))
        self._group = group = self.admission.make_group([None] * count, has_row_per_slot=True)
        batch = self._make_batch(group.row_requests(), self._capacity)
        will_decode = any(request.settings.max_new_tokens for request in group.requests.values())
        group.prefill = Prefill(self.runner, batch, prefixes, will_decode=will_decode, scores=group.scores)

    def _refill(self) -> None:
        """Begins a group for free slots of a running batch."""
        self._grow(self._capacity)
        preferred: list[int | None] = [None] * self.admission.num_next
        prefixes = None
        if self.is_open:
            preferred, prefixes = copy_prefixes(
                self.runner, self.state, self.admission.next_requests, self.admission.refill_size
            )
        self._group = group = self.admission.make_group(preferred)
        batch = self._make_batch(group.row_requests(), self.state.capacity)
        group.prefill = Prefill(self.runner, batch, prefixes, scores=group.scores)

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
        limits = jax.device_put((np.int32(max_rounds), np.int32(self.admission.enough_done)))
        automata = self.state.sampling.automaton, self.state.automaton_b
        needs_automata = self._needs_automata(self.slots.requests.values())
        state = self.state if needs_automata else replace_automata(self.state)
        state = self.runner.call(loops.decode, self.runner.weights, state, *limits, plan=self.runner.plan)
        self.state = state if needs_automata else replace_automata(state, *automata)

    def _empty_state(self) -> DecodeState:
        """Returns the state of an open scheduler without requests, and begins to compile the programs of its rounds."""
        runner = self.runner
        batch = self._make_batch([None] * self.slots.size, self._capacity)
        static = {"plan": runner.plan.shared, "dtype": runner.weights.dtype, "can_cut": runner.can_cut}
        state = runner.call(loops.init_state, *batch, None, None, runner.weights.processor, **static)
        unit = jax.device_put(np.int32(1))
        for form in (replace_automata(state), state):
            runner.start_compiling(loops.decode, runner.weights, form, unit, unit, plan=runner.plan)
        return state.replace(done_b=sharding.place(jnp.ones(self.slots.size, bool), runner.mesh))

    def _grow(self, capacity: int) -> None:
        if self.state.capacity < capacity:
            self.state = self.runner.call(loops.grow_caches, self.state, capacity=capacity)

    def _make_batch(self, rows: Sequence[Request | None], capacity: int) -> Batch:
        """Pads the requests of rows into device arrays. Rows without constraints share automata that are on the device."""
        needs_automata = self._needs_automata(rows)
        batch = make_batch(
            rows,
            self.sizes,
            capacity=capacity,
            dtype=self.runner.weights.dtype,
            mesh=self.runner.mesh,
            clock=self.runner.clock,
            automaton=None if needs_automata else self._allow_all.get(len(rows)),
        )
        if not needs_automata and batch.sampling.automaton is not None:
            self._allow_all[len(rows)] = batch.sampling.automaton
        return batch

    def _needs_automata(self, requests: Iterable[Request | None]) -> bool:
        """Returns False if the automata of these requests, whose tables are large, can be left out."""
        return not self.is_open or any(request and request.automaton for request in requests)


def replace_automata(
    state: DecodeState, automaton: Automaton | None = None, automaton_b: jax.Array | None = None
) -> DecodeState:
    """Returns the state with these automata; by default, without any."""
    return state.replace(sampling=state.sampling.replace(automaton=automaton), automaton_b=automaton_b)
