"""`PreparedCall`: a validated call of a model, and its decoding."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from treeflash_jax.core import sharding
from treeflash_jax.core.checks import expect
from treeflash_jax.decoding import processors
from treeflash_jax.decoding.state import DecodePlan, Weights
from treeflash_jax.engine.answers.drawn_trees import AnsweringModel
from treeflash_jax.engine.answers.result_reader import ResultReader
from treeflash_jax.engine.answers.results import Chunk, Result
from treeflash_jax.engine.call.requests import Request
from treeflash_jax.engine.schedule.call_scheduler import CallScheduler
from treeflash_jax.engine.schedule.runner import Runner
from treeflash_jax.engine.schedule.session import Session
from treeflash_jax.engine.settings.generate_config import GenerateConfig
from treeflash_jax.formats import tree_selector_folder

ROUNDS_PER_DISPATCH = 256  # Ctrl-C waits for a dispatch
ROUNDS_PER_STOP_CHECK = 8  # the host searches for stop strings between dispatches


def call_weights(model: AnsweringModel, config: GenerateConfig, plan: DecodePlan) -> Weights:
    """Returns the weights for a call's programs: the model's, and those of the call's processor and tree selector."""
    processor = None if config.processor is None else processors.as_pytree(config.processor)
    return model.weights.replace(
        processor=sharding.place(processor, model.mesh, over_batch=False),
        tree_selector=None if plan.shape.selector is None else tree_selector_folder.load(config.selector, model.mesh),
    )


@dataclass(frozen=True)
class PreparedCall:
    """A validated call of a model.

    Attributes:
      weights: weights of the model and of the call's settings (`call_weights`).
      requests: one request per prompt and sample.
      batch_size: number of sequences decoded together.
    """

    model: AnsweringModel
    weights: Weights
    requests: list[Request]
    plan: DecodePlan
    batch_size: int

    def schedule(self, session: Session | None = None) -> CallScheduler:
        """Returns a scheduler with the requests, or with the only request of a session."""
        runner = Runner(self.plan, self.weights, self.model.mesh, can_cut=session is not None)
        return CallScheduler(runner, self.requests, batch_size=self.batch_size, session=session)

    def answer(self) -> Iterator[tuple[int, Result]]:
        """Decodes the call; yields each answer with the number of its request."""
        unanswered = {request.number: request for request in self.requests}
        rounds = ROUNDS_PER_STOP_CHECK if any(request.settings.stop for request in self.requests) else ROUNDS_PER_DISPATCH
        scheduler = self.schedule()

        def read(reader: ResultReader, slots: Sequence[int]) -> Iterator[tuple[int, Result]]:
            slots = [slot for slot in slots if scheduler.slots.requests[slot].number in unanswered]
            requests = [scheduler.slots.requests[slot] for slot in slots]
            for request, result in zip(requests, reader.read_results(slots), strict=True):
                reader.forget(request)
                del unanswered[request.number]
                with scheduler.runner.clock.paused():
                    yield request.number, result

        try:
            reader = ResultReader(scheduler, self.model)
            for finished in scheduler.decode_all(rounds, reader.find_stopped):
                yield from read(reader, finished)
        except KeyboardInterrupt:  # outside of `decode_all`, or it lost the state; keeps the answers so far
            running = [] if scheduler.is_lost else sorted(scheduler.slots.requests)
            if len(unanswered) == len(self.requests) and not running:
                raise
            scheduler.is_interrupted = True
            yield from read(ResultReader(scheduler, self.model), running)  # the other reader may be half-way
        for number, request in unanswered.items():
            yield number, Result.unanswered(request.ids)

    def stream(self, rounds_per_dispatch: int, session: Session | None = None) -> Iterator[Chunk | Result]:
        """Decodes the only request; yields its chunks, then the result. A session keeps the caches.

        Raises ValueError if there are several requests, or several slots with a session.
        """
        if len(self.requests) != 1:
            samples = 1 + self.requests[-1].sample
            got = f"samples {samples} and {len(self.requests) // samples} prompts"
            raise ValueError(f"got {got}, expected 1 of each: a stream is one answer, `generate` takes several prompts")
        if session is not None:
            expect(self.batch_size == 1, "batch_size", self.batch_size, "1 or none with a session")
        scheduler = self.schedule(session)
        reader = ResultReader(scheduler, self.model)
        try:
            for finished in scheduler.decode_all(rounds_per_dispatch, reader.find_stopped):
                [(chunk, result)] = reader.read_chunks([0], finished)
                with scheduler.runner.clock.paused():
                    yield chunk
        finally:  # also if the caller stops reading before the stream's end
            if session is not None and not scheduler.is_lost:
                session.keep_caches(scheduler.runner, scheduler.state)
        yield result
