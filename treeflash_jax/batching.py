"""A batch: which prompt each of its places decodes, and the turns of reading prompts and running rounds.

A batch has a fixed number of places, so that its programs are compiled once. When enough sequences have finished, a group
of waiting prompts is read in a smaller batch of its own and moved into their places ("continuous batching").
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from treeflash_jax import ahead, programs
from treeflash_jax import mesh as meshes
from treeflash_jax.clock import Clock
from treeflash_jax.decoding.runner import Kept, Runner
from treeflash_jax.decoding.state import DecodeState
from treeflash_jax.planning import Row

REFILLED_SHARE = 1 / 8  # of a batch's places: how many are refilled together


def capacity_bucket(positions: int) -> int:
    """The smallest cache capacity of the ladder 256, 384, 512, 768, 1024, 1536, ... that holds `positions`."""
    size = 256
    while size < positions:
        if size * 3 // 2 >= positions:
            return size * 3 // 2
        size *= 2
    return size


def refilled(size: int) -> int:
    """How many places of a batch of this size are refilled together."""
    return max(1, round(size * REFILLED_SHARE))


@dataclass
class Places:
    """The places of a batch and what each of them decodes.

    Attributes:
      size: places of the batch.
      group: places that are refilled together.
      held: per place, the index of its sequence; None where it is free.
      waiting: indices of the sequences that have no place yet.
    """

    size: int
    group: int
    waiting: deque[int]
    held: list[int | None] = field(init=False)

    def __post_init__(self) -> None:
        self.held = [None] * self.size

    @property
    def is_empty(self) -> bool:
        return all(index is None for index in self.held)

    @property
    def is_refill_due(self) -> bool:
        """Whether a whole group, or all that still wait, can move in."""
        return bool(self.waiting) and self.held.count(None) >= self._next_group

    @property
    def enough(self) -> int:
        """How many done sequences, free places included, decoding should stop at."""
        return self._next_group if self.waiting else self.size

    @property
    def taken(self) -> list[int]:
        return [place for place, index in enumerate(self.held) if index is not None]

    def fill(self) -> list[int]:
        """Gives all places of an empty batch to waiting sequences; returns those that are taken."""
        for place in range(min(self.size, len(self.waiting))):
            self.held[place] = self.waiting.popleft()
        return self.taken

    def admit(self) -> list[int]:
        """Gives free places to the next group; returns these places, in the order of its sequences."""
        free = [place for place, index in enumerate(self.held) if index is None][: self._next_group]
        for place in free:
            self.held[place] = self.waiting.popleft()
        return free

    def done(self, done_b: np.ndarray) -> list[int]:
        """Places whose sequences are done."""
        return [place for place in self.taken if done_b[place]]

    def release(self, places: Sequence[int]) -> None:
        for place in places:
            self.held[place] = None

    @property
    def _next_group(self) -> int:
        return min(self.group, len(self.waiting))


@dataclass(frozen=True)
class Turn:
    """What is known between two dispatches.

    Attributes:
      state: donated to the next dispatch: read a turn before asking for another.
      nodes_bs: nodes that every round verified; None where all rounds verify equally many.
      rows: per place, the sequence it decodes; None where it is free.
      indices: per place, the index of that sequence in the call.
      ready: places whose answers are to be read now: finished ones, or all after an interrupt.
    """

    state: DecodeState
    nodes_bs: Any
    rows: tuple[Row | None, ...]
    indices: tuple[int | None, ...]
    ready: tuple[int, ...]
    clock: Clock
    interrupted: bool = False


class Batch:
    """Sequences that are decoded together, from their prompts to the last token.

    Attributes:
      rows: the sequences, waiting ones included.
      inputs: rows, and keywords `size` and `capacity` -> what the runner reads prompts from.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        size: int,
        capacity: int,
        runner: Runner,
        inputs: Callable[..., Any],
        kept: Kept | None = None,
    ):
        """Reads the prompts of the first sequences.

        Args:
          size: how many of them are decoded together.
          capacity: positions that the caches have at first.
          kept: earlier caches that hold the beginning of the only prompt.
        """
        self.rows, self.runner, self.inputs = rows, runner, inputs
        sizes = (meshes.padded(count, runner.mesh) for count in (size, refilled(size)))
        self.places = Places(*sizes, deque(range(len(rows))))
        self.clock = Clock()
        self.state = None
        self.prepared = 0  # the capacity that programs are compiled ahead for
        self._start(capacity, kept)

    def turns(self, rounds: int, is_over: Callable[[list[int]], bool] | None = None) -> Iterator[Turn]:
        """Decodes all sequences; yields after the prompts are read and after every dispatch.

        Ctrl-C ends the turns with one of all that is there, if the state can still be read.

        Args:
          rounds: of one dispatch, at most.
          is_over: whether tokens are the end of an answer for a reason that programs do not know, such as a stop string.
        """
        try:
            while not self.places.is_empty:
                done_b = meshes.to_host(self.runner.inner(self.state).done_b)
                with self.clock.paused():
                    if is_over is not None and not done_b.all():
                        done_b = self._finish(done_b, is_over)
                    ready = self.places.done(done_b)
                    yield self._turn(ready)
                self.places.release(ready)
                self._go_on(rounds)
        except KeyboardInterrupt:
            if self.is_lost:
                raise
            self.clock.stop()
            yield self._turn(self.places.taken, interrupted=True)

    @property
    def is_lost(self) -> bool:
        """Tells whether an interrupt fell between the donation of the state and its result."""
        return self.state is None or self.runner.inner(self.state).end_b.is_deleted()

    def compile(self) -> None:
        """Compiles what `turns` runs, growing caches excepted, and decodes nothing."""
        self.state = self.runner.run(self.state, 0, self.places.enough, self.clock)
        if self.places.waiting:
            self.places.release(self.places.taken[: self.places.group])
            self._admit()

    def prepare_next(self, positions: int) -> None:
        """Compiles in the background what the conversation's next turn of this many positions needs, if caches grow."""
        decode = self.runner.inner(self.state)
        capacity = capacity_bucket(int(meshes.to_host(decode.end_b)[0]) + positions + self.runner.plan.path_rows)
        if capacity <= decode.capacity:
            return
        shapes, row, clock = programs.shapes_of(decode), replace(self.rows[0], ids=[0]), Clock(silent=True)

        def compile() -> None:
            state = self.runner.start(self.inputs([row], size=1, capacity=capacity), clock, (shapes, 0))
            self.runner.run(state, 0, 1, clock)

        ahead.start(compile)

    def _prepare_growth(self, capacity: int) -> None:
        """Compiles in the background what rounds in larger caches need."""
        self.prepared = capacity
        shapes, clock = programs.shapes_of(self.state), Clock(silent=True)
        ahead.start(lambda: self.runner.run(self.runner.grow(shapes, capacity, clock), 0, self.places.size, clock))

    def _go_on(self, rounds: int) -> None:
        """One dispatch of what comes next: prompts to read, or rounds."""
        if self.places.is_empty and self.places.waiting:
            capacity, self.state = self.runner.inner(self.state).capacity, None  # frees its caches
            self._start(capacity)
        elif self.places.is_refill_due:
            self._admit()
        elif not self.places.is_empty:
            inner = self.runner.inner(self.state)
            end_b, limit_b = meshes.to_host((inner.end_b, inner.sampling.limit_b))
            path, larger = self.runner.plan.path_rows, capacity_bucket(2 * inner.capacity)
            if np.max(end_b) + path > inner.capacity:
                self.state = self.runner.grow(self.state, larger, self.clock)
            elif np.max(limit_b) + path > inner.capacity < 2 * np.max(end_b) and self.prepared < larger:
                self._prepare_growth(larger)
            self.state = self.runner.run(self.state, rounds, self.places.enough, self.clock)

    def _start(self, capacity: int, kept: Kept | None = None) -> None:
        """Reads the prompts of as many sequences as an empty batch has places for."""
        new = [self.rows[self.places.held[place]] for place in self.places.fill()]
        self.state = self.runner.start(self.inputs(new, size=self.places.size, capacity=capacity), self.clock, kept)

    def _admit(self) -> None:
        """Reads the prompts of waiting sequences and moves them into free places."""
        taken = self.places.admit()
        new = [self.rows[self.places.held[place]] for place in taken]
        inputs = self.inputs(new, size=self.places.group, capacity=self.runner.inner(self.state).capacity)
        try:
            self.state = self.runner.admit(self.state, inputs, taken, self.clock)
        except KeyboardInterrupt:
            self.places.release(taken)  # the state still holds the sequences before them
            raise

    def _finish(self, done_b: np.ndarray, is_over: Callable[[list[int]], bool]) -> np.ndarray:
        """Which sequences are done, now that their tokens were looked at."""
        inner = self.runner.inner(self.state)
        tokens_bs, end_b = meshes.to_host((inner.tokens_bs, inner.end_b))
        done_b = done_b.copy()
        for place in self.places.taken:
            if not done_b[place]:
                length = self.rows[self.places.held[place]].length
                done_b[place] = is_over(tokens_bs[place, length : end_b[place]].tolist())
        self.state = self.runner.finish(self.state, done_b)
        return done_b

    def _turn(self, ready: Sequence[int], interrupted: bool = False) -> Turn:
        return Turn(
            state=self.runner.inner(self.state),
            nodes_bs=self.runner.nodes(self.state),
            rows=tuple(None if index is None else self.rows[index] for index in self.places.held),
            indices=tuple(self.places.held),
            ready=tuple(ready),
            clock=self.clock,
            interrupted=interrupted,
        )
