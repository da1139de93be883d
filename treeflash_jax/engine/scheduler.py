"""Sequences decoded together in a fixed number of slots.

The number of slots never changes, so that programs are compiled once. When enough sequences have finished, a group of
waiting requests is prefilled in a smaller batch and moved into their slots ("continuous batching").

Shape suffixes: b batch, s token slots, a admitted sequences.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treeflash_jax.core import programs, sharding
from treeflash_jax.core.clock import Clock
from treeflash_jax.decoding import loops
from treeflash_jax.decoding.state import DecodePlan, DecodeState, Weights
from treeflash_jax.engine.batching import Batch, first_capacity, make_batch, refill_size, round_capacity
from treeflash_jax.engine.requests import Request

FindStopped = Callable[[list[int]], list[int]]
Kept = tuple[DecodeState, np.ndarray]  # an earlier state, donated, and how many positions of each sequence to keep
LEAST_REUSED = 64  # tokens; a shorter beginning is read again


class Slots:
    """Slots of a batch: the requests that they hold, and those that wait for one.

    Args:
      size: number of slots.
      refill_size: number of slots that are refilled together.
    """

    def __init__(self, size: int, refill_size: int, requests: Iterable[Request] = ()):
        self.size, self.refill_size = size, refill_size
        self.waiting = deque(requests)
        self.held: dict[int, Request] = {}
        self.free = [*range(size)]  # the longest free first

    @property
    def next_refill(self) -> int:
        """Number of requests admitted next."""
        return min(self.refill_size, len(self.waiting))

    @property
    def is_refill_due(self) -> bool:
        return bool(self.waiting) and len(self.free) >= self.next_refill

    @property
    def enough_done(self) -> int:
        """Number of done sequences, free slots included, at which decoding stops."""
        return self.next_refill if self.waiting else self.size

    def fill(self, limit: int, wanted: Sequence[int] = ()) -> list[int]:
        """Assigns up to `limit` free slots to waiting requests and returns these slots: those wanted, if they are free."""
        filled = []
        for number in range(min(limit, len(self.waiting), len(self.free))):
            slot = wanted[number] if number < len(wanted) and wanted[number] in self.free else self.free[0]
            self.free.remove(slot)
            self.held[slot] = self.waiting.popleft()
            filled.append(slot)
        return filled

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            del self.held[slot]
            self.free.append(slot)


class Scheduler:
    """Decodes requests in the slots of one batch, by the compiled programs of one plan.

    `submit` takes requests at any time, and `cancel` drops one. A `step` prefills some that wait, or runs rounds of those
    that have a slot; the caller reads the answers of slots that are done from `state`, and releases the slots.

    Args:
      capacity: capacity of the caches, large enough for every request; None: large enough for the prompts, and doubled when
        an answer outgrows it.
      for_server: whether requests keep coming: prefill then copies the caches of the slot that shares the longest prefix
        with a prompt, and rounds in which no answer has a constraint run a program without automata.

    Attributes:
      mesh: mesh of weights and states; None for one device.
      clock: time since the start, without compilation.
      state: decoding state, donated to every program; None before the first step.
      reused: number of prompt tokens in each slot that were in caches before.
      is_interrupted: whether Ctrl-C ended the decoding.
    """

    def __init__(
        self,
        plan: DecodePlan,
        weights: Weights,
        *,
        mesh: Any = None,
        batch_size: int = 1,
        capacity: int | None = None,
        for_server: bool = False,
    ):
        self.plan, self.weights, self.mesh, self.clock = plan, weights, mesh, Clock()
        self.slots = Slots(*(sharding.pad_batch_size(size, mesh) for size in (batch_size, refill_size(batch_size))))
        self.state: DecodeState | None = None
        self.is_interrupted = False
        self.reused = np.zeros(self.slots.size, int)
        self._is_fixed, self._capacity, self._kept = capacity is not None, capacity or 0, None
        self._for_server = self._for_session = for_server

    @property
    def is_lost(self) -> bool:
        """True if an interrupt fell between the donation of the state and its result."""
        return self.state is None or self.state.end_b.is_deleted()

    def submit(self, requests: Sequence[Request], session: "Session | None" = None) -> None:
        """Queues requests; those without a free slot wait for one.

        Args:
          session: caches that may contain the beginning of the only prompt; taken from it.
        """
        self.slots.waiting.extend(requests)
        if not self._is_fixed:
            self._capacity = max(self._capacity, first_capacity(self.plan, requests))
        self._for_session |= session is not None
        self._kept = session.take_caches(self, requests[0].ids) if session else None
        if self._kept is not None:  # prefill continues at any position, so its last chunk may extend beyond the prompt
            longest = requests[0].length + self.plan.prefill.chunk
            self._capacity = max(self._capacity, self._kept[0].capacity, round_capacity(longest))

    def cancel(self, request: Request) -> None:
        """Drops a request that waits, or frees its slot."""
        self.slots.waiting = deque(other for other in self.slots.waiting if other is not request)
        slots = [slot for slot, held in self.slots.held.items() if held is request]
        if slots:
            self.end(slots)
            self.slots.release(slots)

    def step(self, max_rounds: int, find_stopped: FindStopped = lambda slots: []) -> list[int]:
        """Prefills waiting requests, or runs up to `max_rounds` rounds; returns the slots whose answers are finished.

        Args:
          find_stopped: function of slots, which returns those whose answers contain a stop string.
        """
        fills_batch = not self.slots.held and len(self.slots.waiting) >= self.slots.size
        if self.state is None or (fills_batch and not self._for_server):
            self._prefill_batch()
        elif self.slots.is_refill_due:
            self._refill()
        else:
            self._run_rounds(max_rounds)
        done_b = sharding.to_host(self.state.done_b)
        ready = [slot for slot in sorted(self.slots.held) if done_b[slot]]
        stopped = find_stopped([slot for slot in sorted(self.slots.held) if slot not in ready])
        if stopped:
            self.end(stopped)
        return sorted(ready + stopped)

    def end(self, slots: Sequence[int]) -> None:
        """Marks sequences as done, so that rounds no longer wait for them."""
        done_b = sharding.to_host(self.state.done_b).copy()
        done_b[slots] = True
        self.state = self.state.replace(done_b=sharding.place(jnp.asarray(done_b), self.mesh))

    def decode_all(self, max_rounds: int, find_stopped: FindStopped) -> Iterator[list[int]]:
        """Decodes all requests; yields the slots of finished answers after every `step`, and releases them.

        After Ctrl-C, it yields all used slots, if the state can still be read.
        """
        try:
            while self.slots.waiting or self.slots.held:
                ready = self.step(max_rounds, find_stopped)
                yield ready
                self.slots.release(ready)
        except KeyboardInterrupt:
            if self.is_lost:
                raise
            self.is_interrupted = True
            yield sorted(self.slots.held)

    def compile_programs(self) -> None:
        """Compiles the programs of the submitted requests, except for larger caches, without decoding."""
        self._prefill_batch()
        self._run_rounds(0)
        if self.slots.waiting:
            self.slots.release(sorted(self.slots.held)[: self.slots.refill_size])
            self._refill()

    def prefill(
        self, batch: Batch, kept: Kept | None = None, first_b: jax.Array | None = None, will_decode: bool = False
    ) -> DecodeState:
        """Returns the state after prompts, read a few chunks per dispatch: progress is logged, and Ctrl-C works.

        Args:
          first_b: first tokens of the answers if they are known; None: sampled.
          will_decode: whether the program of rounds is compiled at the same time.
        """
        tokens_bs, length_b, _ = batch
        plan, capacity = self.plan.prefill, tokens_bs.shape[1]
        unread_b = sharding.to_host(length_b)
        longest = int(np.max(unread_b))
        earlier: tuple[Any, ...] = None, None
        if kept is not None:
            state, kept_b = kept
            unread_b = unread_b - kept_b
            if state.capacity < capacity:
                state = self.call(loops.grow_caches, state, capacity=capacity)
            earlier = state, sharding.place(jax.device_put(kept_b.astype(np.int32)), self.mesh)
        start = partial(
            self.call,
            loops.init_state,
            *batch,
            *earlier,
            self.weights.processor,
            plan=plan,
            dtype=self.weights.dtype,
            for_session=self._for_session,
        )
        state = start()
        passes = jax.device_put(np.int32(plan.passes))
        if self._compile_ahead(state, length_b, first_b, will_decode) and kept is None:
            self._run_once(state, length_b, first_b, will_decode)
            state = start()
        first = longest - int(np.max(unread_b))
        for _ in self.clock.reading(range(first, longest, plan.passes * plan.chunk_size(capacity)), longest):
            state = self.call(loops.prefill_chunks, self.weights, state, length_b, passes, first_b, plan=plan)
            jax.block_until_ready(state)
        return state

    def _compile_ahead(self, state: DecodeState, length_b: jax.Array, first_b: jax.Array | None, will_decode: bool) -> bool:
        """Compiles the programs of a prefill; returns True if one of them has never run."""
        prepare, one = partial(programs.prepare, mesh=self.mesh, clock=self.clock), jax.device_put(np.int32(1))
        # XLA compiles the first, or reads it from JAX's cache, while Python traces the second.
        compiled = [prepare(loops.prefill_chunks, self.weights, state, length_b, one, first_b, plan=self.plan.prefill)]
        if will_decode:
            compiled.append(prepare(loops.decode, self.weights, state, one, one, plan=self.plan))
        programs.wait(*compiled, clock=self.clock)
        return not all(program.has_run for program in compiled)

    def _run_once(self, state: DecodeState, length_b: jax.Array, first_b: jax.Array | None, will_decode: bool) -> None:
        """Runs new programs on one chunk and one round of a state that is thrown away; the clock counts it as compilation.

        The first run of a program is slow: XLA for CPUs then loads the code of the bodies of its loops.
        """
        one = jax.device_put(np.int32(1))
        with self.clock.compiling("first run", "running new programs once"):
            state = self.call(loops.prefill_chunks, self.weights, state, length_b, one, first_b, plan=self.plan.prefill)
            if will_decode:
                state = self.call(loops.decode, self.weights, state, one, one, plan=self.plan)
            jax.block_until_ready(state)

    def call(self, function: Any, *args: Any, **static: Any) -> Any:
        """Runs a compiled program. A state that is passed in is donated: it cannot be used again."""
        return programs.call(function, *args, mesh=self.mesh, clock=self.clock, **static)

    def _prefill_batch(self) -> None:
        """Prefills waiting requests into all slots of an empty batch."""
        kept, self._kept = self._kept, None
        if self.state is not None:
            self._capacity = max(self._capacity, self.state.capacity)
            self.state = None  # frees its caches
        self.reused[:] = 0 if kept is None else kept[1]
        batch = self._pad(self.slots.fill(self.slots.size), self.slots.size, self._capacity)
        self.state = self.prefill(batch, kept, will_decode=True)

    def _refill(self) -> None:
        """Prefills waiting requests and moves them into free slots."""
        self._grow(self._capacity)
        wanted, kept = self._find_caches() if self._for_server else ((), None)
        slots = self.slots.fill(self.slots.refill_size, wanted)
        self.reused[slots] = 0 if kept is None else kept[1][: len(slots)]
        batch = self._pad(slots, self.slots.refill_size, self.state.capacity)
        try:
            fresh = self.prefill(batch, kept)
        except KeyboardInterrupt:
            self.slots.release(slots)  # the state still has the earlier sequences
            raise
        slots_a = jnp.asarray(np.array(slots + [-1] * (self.slots.refill_size - len(slots)), np.int32))
        self.state = self.call(loops.admit, self.state, fresh, sharding.place(slots_a, self.mesh, over_batch=False))

    def _find_caches(self) -> tuple[list[int], Kept]:
        """Returns the slots that the requests admitted next should get, and copies of the caches that they go on from.

        A slot is wanted by the request that has at least half of its text in common with it.
        """
        known_b = sharding.to_host(self.state.cache.length_b)
        source_a, count_a = np.zeros((2, self.slots.refill_size), np.int32)
        wanted = []
        for number, request in enumerate(islice(self.slots.waiting, self.slots.refill_size)):
            count_b = count_reusable(self.state, request.ids, self.plan.prefill.verifier.vocab_size)
            source = int(np.argmax(count_b))
            if count_b[source] >= LEAST_REUSED:
                source_a[number], count_a[number] = source, count_b[source]
            wanted.append(source if 2 * count_a[number] >= known_b[source] else -1)
        slots_a = sharding.place(jax.device_put(source_a), self.mesh, over_batch=False)
        return wanted, (self.call(loops.copy_slots, self.state, slots_a), count_a)

    def _run_rounds(self, max_rounds: int) -> None:
        """Runs rounds until enough sequences are done; caches without room for a round are doubled before."""
        if np.max(sharding.to_host(self.state.end_b)) + self.plan.path_length > self.state.capacity:
            self._grow(2 * self.state.capacity)
        limits = jax.device_put((np.int32(max_rounds), np.int32(self.slots.enough_done)))
        automata = self.state.sampling.automaton, self.state.automaton_b
        is_unconstrained = self._for_server and not any(request.is_constrained for request in self.slots.held.values())
        state = _replace_automata(self.state) if is_unconstrained else self.state
        state = self.call(loops.decode, self.weights, state, *limits, plan=self.plan)
        self.state = _replace_automata(state, *automata) if is_unconstrained else state

    def _grow(self, capacity: int) -> None:
        if self.state.capacity < capacity:
            self.state = self.call(loops.grow_caches, self.state, capacity=capacity)

    def _pad(self, slots: Sequence[int], batch_size: int, capacity: int) -> Batch:
        return make_batch(
            [self.slots.held[slot] for slot in slots],
            batch_size=batch_size,
            capacity=capacity,
            dtype=self.weights.dtype,
            mesh=self.mesh,
            clock=self.clock,
        )


class Session:
    """A conversation whose caches are kept: prefill skips the tokens of a prompt that they already contain.

    The answers are the same as without a session. If the chat template or the tokenizer encodes earlier messages
    differently, the tokens before the first difference are reused. A stream has the caches to itself until it ends: another
    one that starts meanwhile reads its whole prompt. A session keeps no weights.

    Example:
      >>> session = tf.Session()
      >>> for piece in model.stream(messages, session=session): ...
    """

    def __init__(self):
        self._kept: tuple[DecodeState, Any, list[weakref.ref]] | None = None  # state of the last answer, plan, weights
        self._lock = Lock()

    def __repr__(self) -> str:
        return f"Session({'empty' if self._kept is None else 'with the caches of its last answer'})"

    def keep_caches(self, scheduler: Scheduler) -> None:
        """Keeps the state of a scheduler that has decoded one sequence."""
        if not scheduler.is_lost:
            self._kept = scheduler.state, scheduler.plan.prefill, [*map(weakref.ref, _arrays(scheduler.weights))]

    def take_caches(self, scheduler: Scheduler, ids: list[int]) -> Kept | None:
        """Returns the last state, which the caller donates, and its numbers of reusable prompt tokens; None for none."""
        with self._lock:
            kept, self._kept = self._kept, None
        if kept is None:
            return None
        state, plan, arrays = kept
        same_arrays = [id(array()) for array in arrays] == [id(array) for array in _arrays(scheduler.weights)]
        if plan != scheduler.plan.prefill or not same_arrays:
            return None
        count_b = count_reusable(state, ids, plan.verifier.vocab_size)
        return (state, count_b) if count_b[0] else None


def _replace_automata(state: DecodeState, automaton: Any = None, automaton_b: jax.Array | None = None) -> DecodeState:
    """Returns the state with these automata; by default, without any."""
    return state.replace(sampling=state.sampling.replace(automaton=automaton), automaton_b=automaton_b)


def count_reusable(state: DecodeState, ids: list[int], vocab_size: int) -> np.ndarray:
    """Returns the number of first tokens of a prompt that the caches of each sequence can keep, [b]."""
    tokens_bs, length_b = sharding.to_host((state.tokens_bs, state.cache.length_b))
    prompt_s = np.full(state.capacity, -1)
    prompt_s[: len(ids)] = ids[: state.capacity]
    is_known_bs = np.arange(state.capacity) <= length_b[:, None]  # the last token is in no cache yet
    same_b = np.cumprod((tokens_bs == prompt_s) & is_known_bs, axis=1).sum(axis=1)
    is_damaged_b = np.take_along_axis(tokens_bs, length_b[:, None], axis=1)[:, 0] >= vocab_size  # NaN ended the answer
    count_b = np.where(is_damaged_b, 0, np.maximum(same_b - 1, 0))  # a drafter's state may depend on the token after it
    return sharding.to_host(state.cache.longest_cut(count_b.astype(np.int32)))


def _arrays(weights: Weights) -> list[jax.Array]:
    return jax.tree.leaves((weights.verifier, weights.drafter))
