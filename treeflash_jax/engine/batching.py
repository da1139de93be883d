"""Batches: requests padded into device arrays, and sequences decoded together in a fixed number of slots.

The number of slots never changes, so that programs are compiled once. When enough sequences have finished, a group of
waiting requests is prefilled in a smaller batch and moved into their slots ("continuous batching").
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treeflash_jax.core import programs, sharding
from treeflash_jax.core.checks import INT32
from treeflash_jax.core.clock import Clock
from treeflash_jax.decoding import loops
from treeflash_jax.decoding.runner import Kept, Runner
from treeflash_jax.decoding.state import DecodePlan, Sampling
from treeflash_jax.engine.requests import Request

# Numbers of slots by default, each compiled once. SmolLM2 on two CPU cores, one token at a time: 3 prompts take 14 % longer
# in 4 slots than in 3, and 5 take 20 % longer in 8 slots than in 5. That is 0.2 s for 48 tokens; programs of another size
# take 2 s to load.
BATCH_SIZES = (1, 2, 4, 8)
REFILLED_SHARE = 1 / 8  # share of a batch's slots that are refilled together
INITIAL_ROOM = 1024  # new tokens for which caches have room at first; they grow for longer answers
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")

Batch = tuple[jax.Array, jax.Array, Sampling]  # prompts [b, s], their lengths [b], sampling settings


def round_capacity(positions: int) -> int:
    """Returns the smallest cache capacity of 256, 384, 512, 768, 1024, 1536, ... that holds `positions`."""
    sizes = (size for n in count(7) for size in (2 * 2**n, 3 * 2**n))
    return next(size for size in sizes if size >= positions)


def _capacity(plan: DecodePlan, requests: Sequence[Request], most: int = INT32) -> int:
    """Returns the capacity of caches for these requests with answers of up to `most` tokens."""
    room = min(most, max(request.settings.max_new_tokens for request in requests)) + 1 + plan.path_length
    if plan.drafts and plan.drafter.reads_prompt:
        # Such a drafter has read one token more than the prompt when longer prompts of the batch are still read.
        room = max(room, 1 + plan.prefill_chunk)
    return round_capacity(max(request.length for request in requests) + room)


def largest_caches(plan: DecodePlan, requests: Sequence[Request], batch_size: int, mesh: Any = None) -> tuple[int, int]:
    """Returns the most sequences and positions that the caches of requests, decoded `batch_size` at a time, have at once.

    The caches of a refill exist beside those of the batch, and the last capacity beside the one before, which is copied.
    """
    sizes = [batch_size]
    if 1 < batch_size < len(requests):
        sizes.append(refill_size(batch_size))
    capacity, last = _capacity(plan, requests, INITIAL_ROOM), _capacity(plan, requests)
    while 2 * capacity < last:
        capacity *= 2
    return sum(sharding.padded(size, mesh) for size in sizes), last + (capacity if capacity < last else 0)


def choose_batch_size(requests: int) -> int:
    """Returns the default number of slots: the smallest of BATCH_SIZES with room for all requests, or the last."""
    return next((size for size in BATCH_SIZES if size >= requests), BATCH_SIZES[-1])


def refill_size(batch_size: int) -> int:
    """Returns the number of slots refilled together."""
    return max(1, round(batch_size * REFILLED_SHARE))


def make_batch(requests: Sequence[Request], *, batch_size: int, capacity: int, dtype: Any, mesh: Any = None) -> Batch:
    """Pads prompts and sampling settings into device arrays for `prefill`.

    Args:
      requests: prompts with their sampling settings; at most `batch_size`.
      batch_size: number of sequences; rounded up to a multiple of the mesh's data-parallel groups. Unused slots get a
        one-token prompt that finishes immediately.
      capacity: KV-cache capacity per sequence, in tokens.
      dtype: dtype of the model; settings are at least float32.
      mesh: mesh that shards the batch; None for one device.
    """
    programs.check_process()
    batch_size = sharding.padded(batch_size, mesh)
    first = requests[0] if requests else Request(ids=[0])
    unused = replace(first, ids=[0], settings=replace(first.settings, max_new_tokens=1))
    slots = [*requests, *[unused] * (batch_size - len(requests))]
    tokens_bs = np.zeros((batch_size, capacity), np.int32)
    for i, request in enumerate(slots):
        tokens_bs[i, : request.length] = request.ids

    def column(name: str, dtype: Any) -> np.ndarray:
        return np.array([getattr(request.settings, name) for request in slots], dtype)

    length_b, dtype = np.array([request.length for request in slots], np.int32), jnp.promote_types(dtype, jnp.float32)
    numbers = np.array([(request.settings.seed, request.index, request.sample) for request in slots], np.uint32)
    penalties_b3 = bias = least_b = None  # of those that no request of the call has, programs contain nothing
    if first.given & {*PENALTIES}:
        penalties_b3 = np.stack([column(name, dtype) for name in PENALTIES], axis=1)
    if "logit_bias" in first.given:
        ids, values = np.moveaxis(np.array([request.bias for request in slots]), 2, 0)
        bias = ids.astype(np.int32), values.astype(dtype)
    if "min_new_tokens" in first.given:
        least_b = length_b + column("min_new_tokens", np.int32)
    sampling = Sampling(  # NumPy converts dtypes: JAX would compile a program for each
        key_b=programs.call(loops.make_keys, *jax.device_put([*numbers.T]), clock=Clock(silent=True)),
        temperature_b=column("temperature", dtype),
        top_k_b=column("top_k", np.int32),
        top_p_b=column("top_p", dtype),
        min_p_b=column("min_p", dtype),
        limit_b=length_b + column("max_new_tokens", np.int32),
        stop_ids_bx=np.array([request.stop_ids for request in slots], np.int32),
        drafter_temperature_b=column("drafter_temperature", dtype),
        penalties_b3=penalties_b3,
        bias=bias,
        least_b=least_b,
    )
    return sharding.place(jax.device_put((tokens_bs, length_b, sampling)), mesh)


class Slots:
    """Slots of a batch: the requests that they hold, and those that wait for one. `group` slots are refilled together."""

    def __init__(self, size: int, group: int, requests: Sequence[Request]):
        self.size, self.group = size, group
        self.waiting = deque(requests)
        self.held: dict[int, Request] = {}

    @property
    def next_group(self) -> int:
        """Number of requests admitted next."""
        return min(self.group, len(self.waiting))

    @property
    def is_refill_due(self) -> bool:
        return bool(self.waiting) and self.size - len(self.held) >= self.next_group

    @property
    def enough_done(self) -> int:
        """Number of done sequences, free slots included, at which decoding stops."""
        return self.next_group if self.waiting else self.size

    def fill(self, limit: int) -> list[int]:
        """Assigns up to `limit` free slots to waiting requests and returns these slots."""
        free = [slot for slot in range(self.size) if slot not in self.held]
        filled = free[: min(limit, len(self.waiting))]
        self.held |= {slot: self.waiting.popleft() for slot in filled}
        return filled

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            del self.held[slot]


class BatchDecoder:
    """Decodes requests in the slots of one batch, from their prompts to the last token.

    Attributes:
      state: decoding state; donated to every dispatch.
      is_interrupted: whether Ctrl-C ended the decoding.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        batch_size: int,
        runner: Runner,
        session: "Session | None" = None,
    ):
        """Prefills the first requests.

        Args:
          requests: requests to decode; those beyond `batch_size` wait for a free slot.
          session: caches that may contain the beginning of the only prompt; taken from it.
        """
        self.runner, self.clock = runner, runner.clock
        sizes = (sharding.padded(size, runner.mesh) for size in (batch_size, refill_size(batch_size)))
        self.slots = Slots(*sizes, requests)
        self.state, self.is_interrupted = None, False
        capacity = _capacity(runner.plan, requests, INITIAL_ROOM)
        kept = session.take(runner, requests[0].ids) if session else None
        if kept is not None:  # prefill continues at any position, so its last chunk may extend beyond the prompt
            capacity = max(capacity, kept[0].capacity, round_capacity(requests[0].length + runner.plan.prefill_chunk))
        self._start(capacity, kept)

    @property
    def is_lost(self) -> bool:
        """True if an interrupt fell between the donation of the state and its result."""
        return self.state is None or self.state.end_b.is_deleted()

    def run(self, max_rounds: int, has_stop: Callable[[Request, list[int]], bool]) -> Iterator[list[int]]:
        """Decodes all requests; yields the slots of finished answers after prefill and after every dispatch.

        After Ctrl-C, it yields all used slots, if the state can still be read.

        Args:
          max_rounds: largest number of rounds per dispatch.
          has_stop: predicate of a request and the tokens of its answer: true if they contain a stop string.
        """
        try:
            while self.slots.held:
                done_b = sharding.to_host(self.state.done_b)
                with self.clock.paused():
                    if not done_b.all() and any(request.settings.stop for request in self.slots.held.values()):
                        done_b = self._finish(done_b, has_stop)
                    ready = [slot for slot in sorted(self.slots.held) if done_b[slot]]
                    yield ready
                self.slots.release(ready)
                self._dispatch(max_rounds)
        except KeyboardInterrupt:
            if self.is_lost:
                raise
            self.clock.stop()
            self.is_interrupted = True
            yield sorted(self.slots.held)

    def compile(self) -> None:
        """Compiles the programs of `run`, except for larger caches, without decoding."""
        self.state = self.runner.run(self.state, 0, self.slots.enough_done)
        if self.slots.waiting:
            self.slots.release(sorted(self.slots.held)[: self.slots.group])
            self._admit()

    def _dispatch(self, max_rounds: int) -> None:
        """Prefills waiting requests or runs rounds."""
        if self.slots.waiting and not self.slots.held:
            capacity, self.state = self.state.capacity, None  # frees its caches
            self._start(capacity)
        elif self.slots.is_refill_due:
            self._admit()
        elif self.slots.held:
            self._grow_if_full()
            self.state = self.runner.run(self.state, max_rounds, self.slots.enough_done)

    def _grow_if_full(self) -> None:
        """Enlarges caches without room for a round, to twice their size or that of the longest possible answer."""
        state = self.state
        end_b, limit_b = sharding.to_host((state.end_b, state.sampling.limit_b))
        path = self.runner.plan.path_length
        if np.max(end_b) + path > state.capacity:
            longest = max(np.max(limit_b), np.max(end_b)) + 1 + path
            self.state = self.runner.grow(self.state, round_capacity(min(2 * state.capacity, longest)))

    def _start(self, capacity: int, kept: Kept | None = None) -> None:
        """Prefills requests into all slots of an empty batch."""
        batch = self._pad(self.slots.fill(self.slots.size), self.slots.size, capacity)
        self.state = self.runner.start(batch, kept)

    def _admit(self) -> None:
        """Prefills waiting requests and moves them into free slots."""
        slots = self.slots.fill(self.slots.group)
        batch = self._pad(slots, self.slots.group, self.state.capacity)
        try:
            self.state = self.runner.admit(self.state, batch, slots)
        except KeyboardInterrupt:
            self.slots.release(slots)  # the state still has the earlier sequences
            raise

    def _pad(self, slots: Sequence[int], batch_size: int, capacity: int) -> Batch:
        requests, dtype = [self.slots.held[slot] for slot in slots], self.runner.weights.dtype
        return make_batch(requests, batch_size=batch_size, capacity=capacity, dtype=dtype, mesh=self.runner.mesh)

    def _finish(self, done_b: np.ndarray, has_stop: Callable[[Request, list[int]], bool]) -> np.ndarray:
        tokens_bs, end_b = sharding.to_host((self.state.tokens_bs, self.state.end_b))
        done_b = done_b.copy()
        for slot, request in self.slots.held.items():
            if not done_b[slot]:
                done_b[slot] = has_stop(request, tokens_bs[slot, request.length : end_b[slot]].tolist())
        self.state = self.state.replace(done_b=sharding.place(jnp.asarray(done_b), self.runner.mesh))
        return done_b


class Session:
    """A conversation whose caches are kept: prefill skips the tokens of a prompt that they already contain.

    The answers are the same as without a session. If the chat template or the tokenizer encodes earlier messages
    differently, the tokens before the first difference are reused. A stream has the caches to itself until it ends: another
    one that starts meanwhile reads its whole prompt.

    Example:
      >>> session = tf.Session()
      >>> for piece in model.stream(messages, session=session): ...
    """

    def __init__(self):
        self.batch: BatchDecoder | None = None  # decoder of the last answer, unless a stream has taken it
        self._lock = Lock()

    def __repr__(self) -> str:
        return f"Session({'empty' if self.batch is None else 'with the caches of its last answer'})"

    def take(self, runner: Runner, ids: list[int]) -> Kept | None:
        """Returns the last state, which the caller donates, and its number of reusable prompt tokens; None for none."""
        with self._lock:
            last, self.batch = self.batch, None
        if last is None or last.is_lost or last.runner.plan.for_prefill() != runner.plan.for_prefill():
            return None
        before, now, state = last.runner.weights, runner.weights, last.state
        if before.verifier is not now.verifier or before.drafter is not now.drafter:
            return None
        tokens_bs, length_b = sharding.to_host((state.tokens_bs, state.cache.length_b))
        known = tokens_bs[0, : length_b[0]]
        prompt = np.array(ids[: known.size])
        same = int(np.cumprod(known[: prompt.size] == prompt).sum())
        return (state, same - 1) if same > 1 else None  # a drafter's state may depend on the token after it
