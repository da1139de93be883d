"""Admission: in which order waiting requests get slots, and how many get one at a time."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from jax.sharding import Mesh

from treeflash_jax.core import sharding
from treeflash_jax.engine.call.requests import Request
from treeflash_jax.engine.schedule.batching import refill_size
from treeflash_jax.engine.schedule.prefill import Prefill
from treeflash_jax.engine.schedule.slots import Slots


@dataclass
class PrefillGroup:
    """Requests whose prompts are read together.

    Attributes:
      requests: request of each slot that is reserved for the group.
      rows: slot of each row of the prefill. A row is unused if its slot is None, or is not in `requests`.
      prefill: the reading of the prompts; None until it has begun, because the group must own its slots if that fails.
    """

    requests: dict[int, Request]
    rows: list[int | None]
    prefill: Prefill | None = None

    @property
    def scores(self) -> bool:
        """True if any request wants the log-probabilities of its prompt."""
        return any(request.settings.prompt_log_probs for request in self.requests.values())

    def row_requests(self) -> list[Request | None]:
        return [self.requests.get(slot) for slot in self.rows]


class Admission:
    """Requests that wait for a slot, first come, first served.

    Args:
      slots: the slots that they wait for.
      mesh: mesh that the rows of a group are padded for; None for one device.
    """

    def __init__(self, slots: Slots, mesh: Mesh | None = None):
        self.slots = slots
        self.refill_size = sharding.pad_batch_size(refill_size(slots.size), mesh)
        self.waiting: deque[Request] = deque()

    @property
    def num_next(self) -> int:
        """Number of requests that are admitted next, while others are decoded."""
        return min(self.refill_size, len(self.waiting))

    @property
    def next_requests(self) -> list[Request]:
        return [*islice(self.waiting, self.num_next)]

    @property
    def is_refill_due(self) -> bool:
        return bool(self.waiting) and len(self.slots.free) >= self.num_next

    @property
    def enough_done(self) -> int:
        """Number of done or empty slots at which rounds stop, so that waiting requests can be admitted."""
        if not self.waiting:
            return self.slots.size
        return max(self.num_next, self.slots.size - len(self.slots.requests) + 1)

    def add(self, requests: Iterable[Request]) -> None:
        self.waiting.extend(requests)

    def make_group(self, preferred: Sequence[int | None], *, has_row_per_slot: bool = False) -> PrefillGroup:
        """Takes as many requests as there are preferred slots, and reserves a slot for each.

        Args:
          preferred: slot that each request should get, if it is free; None: any.
          has_row_per_slot: True gives the group a row for every slot of the batch, in the order of slots. False gives it a
            row for each request, padded to the size of a refill.
        """
        slots = self.slots.reserve(preferred)
        requests = {slot: self.waiting.popleft() for slot in slots}
        if has_row_per_slot:
            return PrefillGroup(requests, [*range(self.slots.size)])
        unused = [None] * (self.refill_size - len(slots))
        return PrefillGroup(requests, [*slots, *unused])

    def remove(self, request: Request) -> None:
        """Drops a request if it is waiting."""
        self.waiting = deque(other for other in self.waiting if other is not request)
