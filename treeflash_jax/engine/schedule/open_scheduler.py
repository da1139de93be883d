"""`OpenScheduler`: decodes requests that keep coming, as in a server."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from treeflash_jax.core import sharding
from treeflash_jax.decoding import loops
from treeflash_jax.decoding.automaton import Automaton
from treeflash_jax.decoding.state import DecodeState
from treeflash_jax.engine.call.requests import Request
from treeflash_jax.engine.schedule.admission import PrefillGroup
from treeflash_jax.engine.schedule.batching import Batch, SamplingSizes
from treeflash_jax.engine.schedule.prefixes import copy_prefixes
from treeflash_jax.engine.schedule.runner import Runner
from treeflash_jax.engine.schedule.scheduler import Scheduler


class OpenScheduler(Scheduler):
    """Decodes requests that may be submitted and cancelled at any time.

    Running answers do not wait for new prompts: a chunk of a prompt alternates with a round. Prompts continue from the
    caches of any slot. Rounds of answers without constraints run a program without automata.

    Args:
      capacity: capacity of the caches, large enough for every request.
    """

    def __init__(self, runner: Runner, sizes: SamplingSizes, *, batch_size: int, capacity: int):
        super().__init__(runner, sizes, batch_size=batch_size)
        self._capacity = capacity
        self._group: PrefillGroup | None = None  # group whose prompts are being read
        self._allow_all: dict[int, Automaton | None] = {}  # automata that allow everything, by number of rows

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests; those without a free slot wait for one."""
        self.admission.add(requests)

    def cancel(self, request: Request) -> None:
        """Drops a request in any phase: waiting, reading of its prompt, or decoding."""
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
        lost = dict(self.slots.requests)
        if self._group is not None:
            lost |= self._group.requests
        self.state = None
        self._group = None
        self.slots.release([*lost])
        return [*lost.values()]

    def _advance(self, max_rounds: int) -> None:
        """Reads chunks of the next prompts, or runs rounds; while there are both prompts and answers, one of each."""
        if self.state is None:
            self.state = self._empty_state()
        if self._group is None and self.admission.is_refill_due:
            self._begin_group()
        if self._group is None:
            self._run_rounds(max_rounds)
            return
        has_answers = bool(self.slots.requests)
        self._group.prefill.read(1 if has_answers else self.runner.plan.shared.prefill_passes)
        if self._group.prefill.is_complete:
            self._admit(self._group)
            self._group = None
        if has_answers:
            self._run_rounds(1)

    def _begin_group(self) -> None:
        requests = self.admission.next_requests
        num_rows = self.admission.refill_size
        preferred, prefixes = copy_prefixes(self.runner, self.state, requests, num_rows)
        self._group = self.admission.make_group(preferred)
        self._begin_prefill(self._group, self.state.capacity, prefixes)

    def _empty_state(self) -> DecodeState:
        """Returns the state without requests, and begins to compile the programs of its rounds."""
        runner = self.runner
        batch = self._make_batch([None] * self.slots.size, self._capacity)
        state = runner.call(
            loops.init_state,
            *batch,
            None,
            None,
            runner.weights.processor,
            plan=runner.plan.shared,
            dtype=runner.weights.dtype,
            can_cut=runner.can_cut,
        )
        unit = jax.device_put(np.int32(1))
        for possible in (replace_automata(state, None, None), state):
            runner.start_compiling(loops.decode, runner.weights, possible, unit, unit, plan=runner.plan)
        return state.replace(done_b=sharding.place(jnp.ones(self.slots.size, bool), runner.mesh))

    def _make_batch(self, rows: Sequence[Request | None], capacity: int, automaton: Automaton | None = None) -> Batch:
        """As in `Scheduler`, but rows without constraints share automata that are on the device."""
        if any(request and request.automaton for request in rows):
            return super()._make_batch(rows, capacity)
        batch = super()._make_batch(rows, capacity, self._allow_all.get(len(rows)))
        self._allow_all[len(rows)] = batch.sampling.automaton
        return batch

    def _decode(self, state: DecodeState, max_rounds: int) -> DecodeState:
        """As in `Scheduler`, but without automata, whose tables are large, if no running answer has a constraint."""
        if any(request.automaton for request in self.slots.requests.values()):
            return super()._decode(state, max_rounds)
        decoded = super()._decode(replace_automata(state, None, None), max_rounds)
        return replace_automata(decoded, state.sampling.automaton, state.automaton_b)


def replace_automata(state: DecodeState, automaton: Automaton | None, automaton_b: jax.Array | None) -> DecodeState:
    return state.replace(sampling=state.sampling.replace(automaton=automaton), automaton_b=automaton_b)
