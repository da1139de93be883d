"""`CallScheduler`: decodes the requests of one call."""

from collections.abc import Sequence

from treeflash_jax.engine.call.requests import Request
from treeflash_jax.engine.schedule.admission import PrefillGroup
from treeflash_jax.engine.schedule.batching import SamplingSizes, first_capacity
from treeflash_jax.engine.schedule.prefill import PrefixCaches
from treeflash_jax.engine.schedule.runner import Runner
from treeflash_jax.engine.schedule.scheduler import Scheduler
from treeflash_jax.engine.schedule.session import Session


class CallScheduler(Scheduler):
    """Decodes requests that are all known at the start.

    Throughput comes first: an empty batch is filled at once, and rounds wait for prompts. Caches have room for the prompts,
    and are doubled when an answer outgrows them.

    Args:
      session: session from whose caches the only request continues. The caches move to the scheduler.
    """

    def __init__(
        self,
        runner: Runner,
        requests: Sequence[Request],
        *,
        batch_size: int = 1,
        session: Session | None = None,
    ):
        super().__init__(runner, SamplingSizes.fit(requests), batch_size=batch_size)
        self._capacity = first_capacity(runner.plan, requests)
        self._session_caches: PrefixCaches | None = None
        if session is not None:
            self._session_caches = session.take_caches(runner, requests[0], self._capacity)
        if self._session_caches is not None:
            self._capacity = self._session_caches.capacity
        self.admission.add(requests)

    def compile_programs(self) -> None:
        """Compiles the programs of the requests without decoding, except those for larger caches."""
        self._read_prompts()
        self._run_rounds(0)
        if self.admission.waiting:
            self.slots.release(sorted(self.slots.requests)[: self.admission.refill_size])
            self._read_prompts()

    def _advance(self, max_rounds: int) -> None:
        """Reads the prompts of a group if one is due; otherwise runs rounds."""
        if not self._read_prompts():
            self._run_rounds(max_rounds)

    def _read_prompts(self) -> bool:
        """Reads the prompts of the next group, which then gets its slots. Returns False if no group is due."""
        waiting = self.admission.waiting
        fills_batch = not self.slots.requests and len(waiting) >= self.slots.size
        if waiting and (self.state is None or fills_batch):
            group = self._fill_batch()
        elif self.admission.is_refill_due:
            self._grow(self._capacity)
            group = self.admission.make_group([None] * self.admission.num_next)
            self._begin_prefill(group, self.state.capacity)
        else:
            return False
        group.prefill.read_all()
        self._admit(group)
        return True

    def _fill_batch(self) -> PrefillGroup:
        """Begins a group for an empty batch: it has a row per slot, and its state becomes the state of the batch."""
        prefixes, self._session_caches = self._session_caches, None
        if self.state is not None:
            self._capacity = max(self._capacity, self.state.capacity)
            self.state = None  # frees its caches
        count = min(self.slots.size, len(self.admission.waiting))
        group = self.admission.make_group([None] * count, has_row_per_slot=True)
        will_decode = any(request.settings.max_new_tokens for request in group.requests.values())
        self._begin_prefill(group, self._capacity, prefixes, will_decode=will_decode)
        return group
