"""Which prompt each sequence of a batch decodes, and when waiting prompts take the places of finished ones.

A batch has a fixed number of places, so that its programs are compiled once. When enough sequences have finished, a group
of waiting prompts is read in a smaller batch of its own and moved into their places ("continuous batching"). Everything
here runs on the host and knows indices only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from treeflash_jax.clock import Clock
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
      state: donated to the next dispatch.
      rows: per place, the sequence it decodes; None where it is free.
      indices: per place, the index of that sequence in the call.
      ready: places whose answers are to be read now: finished ones, or all after an interrupt.
      clock: seconds so far.
      interrupted: by Ctrl-C.
    """

    state: DecodeState
    rows: tuple[Row | None, ...]
    indices: tuple[int | None, ...]
    ready: tuple[int, ...]
    clock: Clock
    interrupted: bool = False


def turn(places: Places, rows: Sequence[Row], ready: Sequence[int], **rest: Any) -> Turn:
    """The Turn of a batch whose places hold some of `rows`."""
    held = tuple(None if index is None else rows[index] for index in places.held)
    return Turn(rows=held, indices=tuple(places.held), ready=tuple(ready), **rest)
