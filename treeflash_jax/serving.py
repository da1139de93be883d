"""One call of a model: its prompts checked, its batches run, its answers read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from treeflash_jax import mesh as meshes
from treeflash_jax import prompts as prompting
from treeflash_jax.adaptive.runner import choosing
from treeflash_jax.adaptive.selecting import SelectingRunner
from treeflash_jax.batching import Batch, capacity_bucket, refilled
from treeflash_jax.decoding.runner import Runner
from treeflash_jax.drafters import DrafterSizes
from treeflash_jax.memory import check_memory, footprint, room
from treeflash_jax.planning import Row, rows_of, with_builder, with_indices
from treeflash_jax.results import Reader, Result
from treeflash_jax.session import Session
from treeflash_jax.settings import GenerateConfig
from treeflash_jax.trees import DraftTree

if TYPE_CHECKING:
    from treeflash_jax.model import TreeFlash

ROOM_AHEAD = 1024  # new tokens a cache is made for at first; longer answers grow it
NEXT_MESSAGE = 64  # tokens of a conversation's next message for which programs are compiled ahead
ROUNDS_PER_DISPATCH = 256  # how long a Ctrl-C may wait
ROUNDS_PER_STOP_CHECK = 8  # stop strings are looked for on the host
USUAL_BATCH = 8  # sequences decoded together, at most, unless asked otherwise


@dataclass(frozen=True)
class Request:
    """A validated `generate` call: one row per prompt and sample, `size` of them decoded together."""

    rows: list[Row]
    config: GenerateConfig
    size: int

    def by_builder(self, drafter: DrafterSizes | None) -> dict[str | None, list[int]]:
        """Indices of the rows by the builder of their trees, which may depend on their temperature."""
        found: dict[str | None, list[int]] = {}
        for index, row in enumerate(self.rows):
            found.setdefault(with_builder(self.config, drafter, row.temperature).builder, []).append(index)
        return found


def size_of(config: GenerateConfig, num_rows: int) -> int:
    """Returns the number of sequences decoded together."""
    return config.batch_size or min(USUAL_BATCH, num_rows)


def request_of(model: TreeFlash, prompts: Any, config: GenerateConfig, indices: Sequence[int] | None = None) -> Request:
    """What a call with these prompts and settings asks for.

    Raises:
      ValueError: prompts that do not fit the verifier, or caches that, at their full length, do not fit beside the weights.
    """
    prompts = prompting.as_list(prompts)
    rows = rows_of(prompting.encode_each(prompts, model.encode), config, model.verifier)
    rows = with_indices(rows, indices, len(prompts))
    size = size_of(config, len(rows))
    sizes = (size, refilled(size)) if 1 < size < len(rows) else (size,)
    needs = footprint(
        model.verifier,
        model.drafter,
        dtype=model.dtype,
        mesh=model.mesh,
        batch=sum(meshes.padded(count, model.mesh) for count in sizes),
        capacity=capacity_bucket(max(row.length for row in rows) + config.max_new_tokens),
        drafts=config.builder != "none",
        quantize=model.quantize,
    )
    check_memory(needs, room(model.mesh), model.mesh)
    return Request(rows, config, size)


def room_ahead(config: GenerateConfig) -> int:
    """Positions for which a cache is made at first, beyond the prompt."""
    return min(config.max_new_tokens, ROOM_AHEAD) + 1


def runner_of(model: TreeFlash, rows: Sequence[Row], size: int, positions: int, config: GenerateConfig) -> Runner:
    """What decodes a batch.

    Args:
      positions: that each of them may come to need at first, the path of a last round excluded.
    """
    runner = fixed_runner(model, config)
    if config.nodes != "auto" or not runner.plan.drafts:
        return runner
    return choosing(
        runner,
        model.calibrated(runner.plan),
        batch=meshes.padded(size, model.mesh),
        positions=capacity_bucket(positions + runner.plan.path_rows),
        temperatures=[row.temperature for row in rows],
    )


def fixed_runner(model: TreeFlash, config: GenerateConfig) -> Runner:
    """What decodes any batch with these settings, calibrated nodes counting as the largest."""
    plan = model.plan(config)
    if config.selector is None or not plan.drafts:
        return Runner(plan, model.weights, model.mesh)
    return SelectingRunner(plan, model.weights, model.mesh, params=model.selected(config.selector, plan)[1])


def batch_of(
    model: TreeFlash, rows: Sequence[Row], size: int, config: GenerateConfig, session: Session | None = None
) -> Batch:
    """Starts decoding sequences, `size` of them together, and reads the first prompts; a session has one sequence."""
    positions = max(row.length for row in rows) + room_ahead(config)
    runner = runner_of(model, rows, size, positions, config)
    capacity = capacity_bucket(positions + runner.plan.path_rows)
    inputs = partial(model.inputs, config=config)
    kept = session.take(runner, rows[0].ids) if session else None
    if kept is not None:  # reading goes on anywhere, so that the last chunk may be longer than the prompt
        capacity = max(capacity, kept[0].capacity, capacity_bucket(rows[0].length + runner.plan.prefill_chunk))
    batch = Batch(rows, size, capacity, runner, inputs, kept)
    if session:
        session.batch = batch
    return batch


def reader_of(model: TreeFlash, config: GenerateConfig) -> Reader:
    """What makes results of a batch with these settings."""

    def draft(row: Row, ids: list[int]) -> DraftTree:
        *before, anchor = ids
        runner = fixed_runner(model, config)
        capacity = capacity_bucket(len(before) + runner.plan.path_rows + 1)
        inputs = model.inputs([replace(row, ids=before)], config, size=1, capacity=capacity)
        return runner.draft(inputs, len(before), anchor)

    stop_ids = frozenset(model.stop_ids_of(config))
    return Reader(config=config, stop_ids=stop_ids, tokenizer=model.tokenizer, draft=draft)


def serve(model: TreeFlash, request: Request) -> Iterator[Iterator[tuple[int, Result]]]:
    """Answers with the indices of their rows, in one iterator per builder.

    Builders decode apart, so that no answer depends on the temperatures of the others.
    """
    interrupted = False

    def answers(members: list[int], config: GenerateConfig) -> Iterator[tuple[int, Result]]:
        nonlocal interrupted
        rows, reader, unanswered = [request.rows[index] for index in members], reader_of(model, config), set(members)
        rounds = ROUNDS_PER_STOP_CHECK if config.stop else ROUNDS_PER_DISPATCH
        turns = () if interrupted else batch_of(model, rows, request.size, config).turns(rounds, reader.is_over)
        try:
            for turn in turns:
                interrupted = turn.interrupted
                for place, result in zip(turn.ready, reader.read(turn), strict=True):
                    index = members[turn.indices[place]]
                    unanswered.remove(index)
                    yield index, result
                del turn  # its caches make room for those of the next sequences
        except KeyboardInterrupt:  # the state is lost, but not the answers that were read from it
            if unanswered == set(members):
                raise
            interrupted = True
        for index in sorted(unanswered):  # after Ctrl-C
            yield index, Result.unanswered(request.rows[index].ids, has_text=model.tokenizer is not None)

    for builder, members in request.by_builder(model.drafter).items():
        yield answers(members, replace(request.config, builder=builder))
