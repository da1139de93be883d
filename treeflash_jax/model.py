"""Generation as users meet it: prompts in, texts and statistics out; batching, streaming, loading."""

from __future__ import annotations

import logging
import warnings
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from treeflash_jax import mesh as meshes
from treeflash_jax import prompts as prompting
from treeflash_jax import quantized, trees
from treeflash_jax.adaptive import budget as budgets
from treeflash_jax.adaptive import calibration
from treeflash_jax.batching import Places, Turn, capacity_bucket, refilled, turn
from treeflash_jax.checks import whole
from treeflash_jax.clock import Clock
from treeflash_jax.costs import check_memory, footprint, memory_limit
from treeflash_jax.decoding import loops as core
from treeflash_jax.decoding.loops import DecodePlan, DecodeState, Sampling, Weights
from treeflash_jax.drafters.block.config import DrafterConfig
from treeflash_jax.draw import DrawnTree, drawn_tree
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.planning import Row, draft_temperature, drafting, plan_of, resolve, rows_of, with_builder, with_indices
from treeflash_jax.prompts import Prompt
from treeflash_jax.results import Chunk, Result
from treeflash_jax.settings import MOST_ROWS, NO_DRAFTER, GenerateConfig, Settings, takes_settings
from treeflash_jax.verifiers.config import ModelConfig

ROOM_AHEAD = 1024  # new tokens a cache is made for at first; longer answers grow it
STOP_SLOTS = 8  # stop ids per row are padded to a multiple of this, so that changing them rarely recompiles
ROUNDS_PER_DISPATCH = 256  # how long a Ctrl-C may wait
ROUNDS_PER_STOP_CHECK = 8  # stop strings are looked for on the host
LOW_TAU, LOW_TAU_ROUNDS = 1.2, 50
logger = logging.getLogger("treeflash_jax")


class TreeFlash:
    """A verifier and its drafter, ready to generate.

    Example:
      >>> import treeflash_jax as tf
      >>> model = tf.load("tiny")
      >>> result = model.generate(["Tom has 3 apples and buys 4 more. How many apples does he have?"])[0]
      >>> print(result.text, result.tau)
    """

    def __init__(
        self,
        verifier: ModelConfig,
        weights: Weights,
        *,
        drafter: DrafterConfig | None = None,
        tokenizer: Tokenizer | None = None,
        stop_ids: Sequence[int] = (),
        mesh=None,
        budget: Path | None = None,
    ):
        self.verifier = verifier
        self.drafter = drafter
        self.weights = weights
        self.tokenizer = tokenizer
        self.stop_ids = tuple(sorted({*stop_ids, *(tokenizer.stop_ids if tokenizer else ())}))
        self.mesh = mesh
        self.budget = budget  # the file that calibrations of this pair are kept in
        self.calibrations: dict[DecodePlan, calibration.Calibration] = {}
        self.programs: dict[Any, Callable] = {}
        self.noted_plain = False  # whether it was said that nothing is drafted

    @property
    def dtype(self) -> Any:
        """Of weights, caches and activations."""
        return jnp.dtype(self.weights.verifier["embed"].dtype)

    @property
    def quantize(self) -> str | None:
        """Scheme of the verifier's matrices."""
        return quantized.scheme_of(self.weights.verifier)

    @takes_settings
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        config: GenerateConfig | None = None,
        *,
        indices: Sequence[int] | None = None,
        **settings: Unpack[Settings],
    ) -> list[Result]:
        """Answers every prompt. Ctrl-C returns what there is so far, marked "interrupted".

        Args:
          prompts: strings, lists of ids, or chats (lists of {"role", "content"}, whose content is text or a list of
            {"type": "text", "text"} parts); a list of them, or one.
          config: settings; keyword arguments override single ones.
          indices: one per prompt, drawn from in place of its position here: so prompts of a larger set keep their answers
            however the set is cut into calls.
          **settings: fields of GenerateConfig.

        Returns:
          One Result per prompt and sample, in the order of the prompts.

        Raises:
          ValueError: settings or prompts that cannot be served, before any compute.
        """
        rows, config = self._rows(prompts, config, settings, indices)
        results: dict[int, Result] = {}
        for answers in self._serve(rows, config):
            found = dict(answers)
            tokens = sum(len(result.ids) for result in found.values())
            seconds = max((result.seconds for result in found.values()), default=0.0)
            compiling = max((result.compile_seconds for result in found.values()), default=0.0)
            whole = {"seconds": seconds, "compile_seconds": compiling, "tokens_per_second": tokens / max(seconds, 1e-9)}
            results |= {i: replace(result, **whole) for i, result in found.items()}
        _warn_if_wiring_looks_wrong(list(results.values()), self.plan(config))
        return [results[i] for i in range(len(rows))]

    @takes_settings
    def generate_each(
        self,
        prompts: Prompt | Sequence[Prompt],
        config: GenerateConfig | None = None,
        *,
        indices: Sequence[int] | None = None,
        **settings: Unpack[Settings],
    ) -> Iterator[tuple[int, Result]]:
        """Yields every answer as soon as it is finished, whatever its place among the prompts.

        The same answers as `generate`. A batch keeps its size: as sequences finish, waiting prompts take their places, so
        short answers do not wait for long ones.

        Args:
          prompts: as for `generate`.
          config: as for `generate`.
          indices: as for `generate`.
          **settings: fields of GenerateConfig.

        Yields:
          (place of the prompt and sample in the list that `generate` would return, its Result). `seconds` counts from the
          beginning of the call, compilation excluded.

        Raises:
          ValueError: as `generate`, when the first answer is asked for.
        """
        rows, config = self._rows(prompts, config, settings, indices)
        for answers in self._serve(rows, config):
            yield from answers

    def _rows(
        self, prompts: Any, config: GenerateConfig | None, settings: Settings, indices: Sequence[int] | None
    ) -> tuple[list[Row], GenerateConfig]:
        """What a call asks for, checked."""
        config = self._config(config, settings)
        prompts = prompting.as_list(prompts)
        rows = rows_of(prompting.encode_each(prompts, self.encode), config, self.verifier)
        rows = with_indices(rows, indices, len(prompts))
        self._check_memory(rows, config.batch_size or min(8, len(rows)), config)
        return rows, config

    def _serve(self, rows: list[Row], config: GenerateConfig) -> Iterator[Iterator[tuple[int, Result]]]:
        """Answers by builder: decoded apart, so that no answer depends on the temperatures of the others."""
        builders: dict[str | None, list[int]] = {}
        for i, row in enumerate(rows):
            builders.setdefault(with_builder(config, self.drafter, row.temperature).builder, []).append(i)
        interrupted = False

        def answers(members: list[int], own: GenerateConfig) -> Iterator[tuple[int, Result]]:
            nonlocal interrupted
            size = config.batch_size or min(8, len(rows))
            rounds = ROUNDS_PER_STOP_CHECK if config.stop else ROUNDS_PER_DISPATCH
            turns = () if interrupted else self._run([rows[i] for i in members], size, own, rounds)
            unanswered = set(members)
            for now in turns:
                interrupted = now.interrupted
                for place, result in zip(now.ready, self._results(now, own), strict=True):
                    at = members[now.indices[place]]
                    unanswered.remove(at)
                    yield at, result
                del now  # its caches make room for those of the next sequences
            for i in sorted(unanswered):  # after Ctrl-C
                yield i, Result.unanswered(rows[i].ids, has_text=self.tokenizer is not None)

        for builder, members in builders.items():
            yield answers(members, replace(config, builder=builder))

    @takes_settings
    def stream(
        self,
        prompt: Prompt,
        config: GenerateConfig | None = None,
        *,
        rounds_per_dispatch: int = 4,
        **settings: Unpack[Settings],
    ) -> Iterator[Chunk | Result]:
        """Yields Chunks of one answer as rounds finish, then its Result.

        The same tokens as `generate` gives, whatever `rounds_per_dispatch`.

        Args:
          prompt: one prompt as `generate` takes it, alone or in a list.
          config: settings; keyword arguments override single ones.
          rounds_per_dispatch: rounds between two chunks.
          **settings: fields of GenerateConfig.

        Raises:
          ValueError: as `generate`, or several prompts, when the first chunk is asked for.
        """
        config = self._config(config, settings)
        rounds_per_dispatch = whole(rounds_per_dispatch, "rounds_per_dispatch", least=1)
        if config.samples != 1:
            raise ValueError(f"got samples {config.samples}, expected 1: a stream is one answer")
        rows = rows_of([self.encode(prompting.only(prompt))], config, self.verifier)
        self._check_memory(rows, 1, config)
        config = with_builder(config, self.drafter, rows[0].temperature)
        sent, shown = 0, ""
        for now in self._run(rows, 1, config, rounds_per_dispatch):
            [result] = self._results(replace(now, ready=(0,)), config)
            text = result.text or ""
            if not now.ready:
                text = text[: len(text) - _uncertain(text, config.stop)]
            yield Chunk(ids=result.ids[sent:], text=text[len(shown) :], rounds=len(result.accept_lengths))
            sent, shown = len(result.ids), text
        yield result

    @takes_settings
    def warmup(
        self,
        prompt_tokens: int = 64,
        num_prompts: int = 1,
        config: GenerateConfig | None = None,
        **settings: Unpack[Settings],
    ) -> float:
        """Compiles what a following `generate` or `stream` with the same settings will run, and decodes nothing.

        Programs depend on how many prompts are decoded together, on the size of the caches (the longest prompt and
        `max_new_tokens`, rounded up) and on the settings of drafting; prompts, filters and seeds change nothing, and
        temperatures only where they choose the builder. Caches of answers beyond ROOM_AHEAD tokens grow, and compile again,
        when answers get that long.

        Example:
          >>> model.warmup(prompt_tokens=200, max_new_tokens=256)
          >>> result = model.generate(prompt, max_new_tokens=256)[0]  # result.compile_seconds is 0

        Args:
          prompt_tokens: length of the longest prompt to come.
          num_prompts: how many of them the call will hold; 1 for `stream`.
          config: settings of that call; keyword arguments override single ones.
          **settings: fields of GenerateConfig.

        Returns:
          Seconds that compiling took; 0 where everything was compiled before.

        Raises:
          ValueError: settings or sizes that cannot be served.
        """
        config = self._config(config, settings)
        prompt_tokens = whole(prompt_tokens, "prompt_tokens", least=1)
        num_prompts = whole(num_prompts, "num_prompts", least=1, most=MOST_ROWS)
        rows = rows_of([[0] * prompt_tokens] * num_prompts, config, self.verifier)
        size = config.batch_size or min(8, len(rows))
        self._check_memory(rows, size, config)
        clock = Clock()
        for builder in dict.fromkeys(with_builder(config, self.drafter, row.temperature).builder for row in rows):
            own = replace(config, builder=builder)
            plan, _, places, state = self._begin(rows, size, own, clock)
            no_rounds = jnp.int32(0), jnp.int32(places.enough)
            state = self._call(core.decode, (self.weights, state, *no_rounds), clock, plan=plan)
            if places.waiting:
                places.release(places.taken[: places.group])
                self._admit(state, places, rows, own, clock, plan)
        return clock.compile_seconds

    def encode(self, prompt: Prompt) -> list[int]:
        """Ids of a prompt. Strings and chats need a tokenizer; strings are taken as they are, chats through the template.

        Raises:
          ValueError: an empty prompt, text without a tokenizer, or a chat with anything but text in it.
        """
        return prompting.encode(prompt, self.tokenizer, self.verifier.max_positions)

    def plan(self, config: GenerateConfig) -> DecodePlan:
        """The compiled program's shape for these settings; with nodes "auto", that of the largest trees ever measured.

        Raises:
          ValueError: nodes "auto", and no calibration of this pair, device and draft settings.
        """
        plan = plan_of(config, self.verifier, self.drafter, self.dtype)
        if config.nodes != "auto" or not plan.drafts:
            return plan
        nodes = self.calibrated(plan).nodes
        return replace(plan, num_nodes=nodes[-1], buckets=tuple(nodes))

    def calibrated(self, plan: DecodePlan) -> calibration.Calibration:
        """What `treeflash calibrate` found for the pair as this plan drafts.

        Raises:
          ValueError: it was never run, or for another pair, device or settings.
        """
        key = replace(plan, num_nodes=1, buckets=())
        if key not in self.calibrations:
            identity = calibration.identity_of(self.verifier, self.weights, plan, self.mesh)
            self.calibrations[key] = calibration.find(self.budget or calibration.place(None), identity)
        return self.calibrations[key]

    def _choose(
        self, plan: DecodePlan, rows: list[Row], size: int, capacity: int
    ) -> tuple[DecodePlan, calibration.Decision | None]:
        """The plan of a batch whose rounds choose their nodes, and by what; or one-token decoding, and nothing."""
        temperatures = [row.temperature for row in rows]
        decision = self.calibrated(plan).decide(self._padded(size), capacity, temperatures)
        if not decision.buckets:
            return plan.one_token(), None
        return replace(plan, num_nodes=decision.buckets[-1], buckets=decision.buckets), decision

    def _budget(self, plan: DecodePlan, decision: calibration.Decision, state: DecodeState) -> budgets.Budget:
        """The budget of a fresh state, in place on the mesh."""
        times = budgets.RoundTimes(
            positions_c=np.array(decision.positions, np.float32),
            round_cn=np.array(decision.round_seconds, np.float32),
            step_c=np.array(decision.step_seconds, np.float32),
        )
        budget = budgets.start(
            self._place(jax.tree.map(jnp.asarray, times), by_rows=False),
            reliability=decision.reliability,
            debt=decision.debt,
            batch=state.end_b.size,
            capacity=state.capacity,
            pending=plan.path_rows,
            features=len(plan.taps) * self.verifier.hidden_size,
            dtype=self.dtype,
        )
        return self._place(budget.replace(times=None)).replace(times=budget.times)

    def _config(self, config: GenerateConfig | None, settings: Settings) -> GenerateConfig:
        is_default = getattr(config, "builder", None) is None and not (settings.get("builder") or settings.get("method"))
        config = resolve(config, settings, self.verifier, self.drafter)
        if is_default and self.drafter is None and not self.noted_plain:
            self.noted_plain = True
            logger.warning(f"{NO_DRAFTER}: decoding one token at a time (builder 'none' does so without this note)")
        if config.stop and self.tokenizer is None:
            raise ValueError("got stop strings, but the verifier's folder has no tokenizer.json; give stop_ids instead")
        return config

    def _check_memory(self, rows: list[Row], size: int, config: GenerateConfig) -> None:
        """Refuses a request whose caches, at the length it asks for, do not fit beside the weights."""
        needs = footprint(
            self.verifier,
            self.drafter,
            dtype=self.dtype,
            mesh=self.mesh,
            batch=self._padded(size) + (self._padded(refilled(size)) if 1 < size < len(rows) else 0),
            capacity=capacity_bucket(max(row.length for row in rows) + config.max_new_tokens),
            drafts=config.builder != "none",
            quantize=self.quantize,
        )
        check_memory(needs, memory_limit(self.mesh), self.mesh)

    def _padded(self, size: int) -> int:
        """Rows of a batch: a multiple of the mesh's data axis."""
        ways = 1 if self.mesh is None else dict(self.mesh.shape)["data"]
        return -(-size // ways) * ways

    def _run(self, rows: list[Row], size: int, config: GenerateConfig, rounds: int) -> Iterator[Turn]:
        """Prefill, then dispatches of at most `rounds` rounds; a Turn after each, prefill included.

        As sequences finish, waiting ones take their places. States are donated to the next dispatch: read a turn before
        asking for more.
        """
        clock = Clock()
        plan, decision, places, state = self._begin(rows, size, config, clock)
        limit = jnp.int32(rounds)
        try:
            while True:
                done_b = meshes.to_host(state.done_b)
                with clock.paused():
                    if config.stop and not done_b.all():
                        now = turn(places, rows, (), state=state, clock=clock)
                        state, done_b = self._stop_at_strings(now, config)
                    ready = places.done(done_b)
                    yield turn(places, rows, ready, state=state, clock=clock)
                places.release(ready)
                if places.is_empty and places.waiting:
                    capacity, state = state.capacity, None  # nobody needs its caches
                    state = self._read_first(rows, places, capacity, config, clock, plan)
                    if decision is not None:
                        state = state.replace(budget=self._budget(plan, decision, state))
                    continue
                if places.is_refill_due:
                    state = self._admit(state, places, rows, config, clock, plan)
                    continue
                if places.is_empty:
                    return
                if int(np.max(meshes.to_host(state.end_b))) + plan.path_rows > state.capacity:
                    state = self._call(core.grow, (state,), clock, capacity=capacity_bucket(2 * state.capacity))
                state = self._call(core.decode, (self.weights, state, limit, jnp.int32(places.enough)), clock, plan=plan)
        except KeyboardInterrupt:
            if state is None or state.end_b.is_deleted():  # the interrupt fell between a donation and its result
                raise
            clock.stop()
            yield turn(places, rows, places.taken, state=state, clock=clock, interrupted=True)

    def _begin(
        self, rows: list[Row], size: int, config: GenerateConfig, clock: Clock
    ) -> tuple[DecodePlan, calibration.Decision | None, Places, DecodeState]:
        """The plan of a batch, by what its rounds choose, the places of its sequences, and its state after the prefill."""
        plan, decision = self.plan(config), None
        positions = max(row.length for row in rows) + min(config.max_new_tokens, ROOM_AHEAD) + 1
        if plan.buckets:
            plan, decision = self._choose(plan, rows, size, capacity_bucket(positions + plan.path_rows))
        capacity = capacity_bucket(positions + plan.path_rows)
        places = Places(self._padded(size), self._padded(refilled(size)), deque(range(len(rows))))
        state = self._read_first(rows, places, capacity, config, clock, plan)
        if decision is not None:
            state = state.replace(budget=self._budget(plan, decision, state))
        return plan, decision, places, state

    def _read_first(
        self, rows: list[Row], places: Places, capacity: int, config: GenerateConfig, clock: Clock, plan: DecodePlan
    ) -> DecodeState:
        """The state of a batch that was empty, the prompts of its first sequences read."""
        return self._prefill([rows[places.held[at]] for at in places.fill()], places.size, capacity, config, clock, plan)

    def _admit(
        self,
        state: DecodeState,
        places: Places,
        rows: list[Row],
        config: GenerateConfig,
        clock: Clock,
        plan: DecodePlan,
    ) -> DecodeState:
        """The state with waiting sequences, their prompts read, in free places."""
        taken = places.admit()
        new = [rows[places.held[place]] for place in taken]
        fresh = self._prefill(new, places.group, state.capacity, config, clock, plan)
        places_a = np.array(taken + [-1] * (places.group - len(taken)), np.int32)
        places_a = self._place(jnp.asarray(places_a), by_rows=False)
        return self._call(core.admit, (self.weights, state, fresh, places_a), clock, plan=plan)

    def _prefill(
        self, rows: list[Row], size: int, capacity: int, config: GenerateConfig, clock: Clock, plan: DecodePlan
    ) -> DecodeState:
        inputs = self._inputs(rows, size, capacity, config)
        return self._call(core.prefill, (self.weights, *inputs), clock, plan=plan.for_prefill())

    def _stop_at_strings(self, turn: Turn, config: GenerateConfig) -> tuple[DecodeState, np.ndarray]:
        """Marks sequences whose text holds a stop string as done."""
        state = turn.state
        tokens_bs, end_b, done_b = meshes.to_host((state.tokens_bs, state.end_b, state.done_b))
        done_b = done_b.copy()
        for i, row in enumerate(turn.rows):
            if row is not None and not done_b[i]:
                text = self._decode(tokens_bs[i, row.length : end_b[i]].tolist()) or ""
                done_b[i] = any(stop in text for stop in config.stop)
        return state.replace(done_b=self._place(jnp.asarray(done_b))), done_b

    def _inputs(self, rows: list[Row], size: int, capacity: int, config: GenerateConfig):
        """Padded arrays of a batch. Padding rows have a one-token prompt and are done after it."""
        size = self._padded(size)
        spare = size - len(rows)
        tokens_bs = np.zeros((size, capacity), np.int32)
        for i, row in enumerate(rows):
            tokens_bs[i, : row.length] = row.ids
        stops = sorted(set(self.stop_ids if config.stop_ids is None else config.stop_ids))
        stop_ids_x = np.full(max(1, -(-len(stops) // STOP_SLOTS)) * STOP_SLOTS, -1, np.int32)
        stop_ids_x[: len(stops)] = stops
        sharpness = [draft_temperature(config, self.drafter, row.temperature) for row in rows] + [1.0] * spare
        dtype = jnp.promote_types(self.dtype, jnp.float32)
        length_b = np.array([row.length for row in rows] + [1] * spare, np.int32)
        new_b = np.array([config.max_new_tokens] * len(rows) + [1] * spare, np.int32)
        seeds_b = np.array([row.seed for row in rows] + [0] * spare, np.uint32)
        index_b = np.array([row.index for row in rows] + [0] * spare, np.uint32)
        sampling = Sampling(
            key_b=_row_keys(seeds_b, index_b),
            temperature_b=jnp.asarray([row.temperature for row in rows] + [0.0] * spare, dtype),
            top_k_b=jnp.asarray([row.top_k for row in rows] + [0] * spare, jnp.int32),
            top_p_b=jnp.asarray([row.top_p for row in rows] + [1.0] * spare, dtype),
            limit_b=jnp.asarray(length_b + new_b),
            stop_ids_bx=jnp.asarray(np.broadcast_to(stop_ids_x, (size, stop_ids_x.size))),
            drafter_temperature_b=jnp.asarray(sharpness, dtype),
        )
        return self._place((jnp.asarray(tokens_bs), jnp.asarray(length_b), sampling))

    def _place(self, batch: Any, *, by_rows: bool = True) -> Any:
        """Puts rows over the mesh's data axis; scalars, and what has no rows, everywhere."""
        if self.mesh is None:
            return batch

        def put(x: jax.Array) -> jax.Array:
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):  # cannot be put on the devices of other processes
                return jax.random.wrap_key_data(put(jax.random.key_data(x)))
            axes = ("batch" if by_rows else None,) + (None,) * (x.ndim - 1) if x.ndim else ()
            spec = meshes.partition(axes, x.shape, self.mesh)
            while spec and spec[-1] is None:  # as programs spell the layout of what they hand on
                spec = jax.sharding.PartitionSpec(*spec[:-1])
            return jax.device_put(x, jax.sharding.NamedSharding(self.mesh, spec))

        return jax.tree.map(put, batch)

    def _call(self, function: Any, args: tuple[Any, ...], clock: Clock, **static: Any) -> Any:
        """Runs a compiled program, compiling it first (off the clock) where these shapes are new."""
        leaves, structure = jax.tree.flatten(args)
        shapes = tuple((x.shape, x.dtype, x.sharding) for x in leaves)
        key = (function, tuple(static.items()), structure, shapes)
        with meshes.ambient(self.mesh):
            if key not in self.programs:
                with clock.compiling(function.__name__, _compile_note()):
                    self.programs[key] = function.lower(*args, **static).compile()
            return self.programs[key](*args)

    def _results(self, turn: Turn, config: GenerateConfig) -> list[Result]:
        """The answers, so far, of the places that are ready."""
        state, clock = turn.state, turn.clock
        tokens_bs, end_b, done_b, rounds_b, accepted_bs = meshes.to_host(
            (state.tokens_bs, state.end_b, state.done_b, state.rounds_b, state.accepted_bs)
        )
        nodes_bs = None if state.budget is None else state.budget.nodes_bs
        log_probs_bs, expected_bs, nodes_bs = meshes.to_host((state.log_probs_bs, state.expected_bs, nodes_bs))
        stop_ids = set(self.stop_ids if config.stop_ids is None else config.stop_ids)
        drafts = config.builder != "none"
        results = []
        for i in turn.ready:
            row = turn.rows[i]
            ids = tokens_bs[i, row.length : end_b[i]].tolist()
            accepted = accepted_bs[i, : rounds_b[i]].tolist()
            finished = "stop" if ids[-1] in stop_ids else "length"
            if turn.interrupted and not done_b[i]:
                finished = "interrupted"
            text = self._decode(ids)
            cuts = [text.index(stop) for stop in config.stop if text and stop in text]
            if cuts:
                ids, text, finished = ids[: self._tokens_until(ids, config.stop)], text[: min(cuts)], "stop"
                while accepted and 1 + sum(accepted[:-1]) >= len(ids):
                    accepted.pop()
            cut = 1 + sum(accepted) - len(ids) if accepted else 0
            kept = [*accepted[:-1], accepted[-1] - cut] if accepted else []
            nodes = None
            if config.nodes == "auto" and drafts:
                nodes = [1] * len(accepted) if nodes_bs is None else nodes_bs[i, : len(accepted)].tolist()
            results.append(
                Result(
                    prompt_ids=row.ids,
                    ids=ids,
                    text=text,
                    builder=drafting(config)[0],
                    accept_lengths=kept,
                    cut=cut,
                    finished=finished,
                    seconds=clock.seconds,
                    compile_seconds=clock.compile_seconds,
                    tokens_per_second=len(ids) / max(clock.seconds, 1e-9),
                    log_probs=None if log_probs_bs is None else log_probs_bs[i, row.length :][: len(ids)].tolist(),
                    expected_lengths=None if expected_bs is None else expected_bs[i, : len(accepted)].tolist(),
                    nodes=nodes,
                    draft_again=partial(self._drawn_tree, row, config, ids, accepted, nodes) if drafts else None,
                )
            )
        return results

    def _tokens_until(self, ids: list[int], stops: Sequence[str]) -> int:
        """The fewest tokens whose text holds a stop string."""
        return bisect_left(range(len(ids)), True, key=lambda n: any(stop in self._decode(ids[:n]) for stop in stops))

    def _drawn_tree(
        self,
        row: Row,
        config: GenerateConfig,
        ids: list[int],
        accepted: list[int],
        nodes: list[int] | None,
        round_index: int,
    ) -> DrawnTree:
        """The tree of one round, from a fresh prefill of everything committed before it."""
        start = 1 + sum(accepted[:round_index])
        *before, anchor = row.ids + ids[:start]
        plan, clock = self.plan(config), Clock()
        prefix = replace(row, ids=before)
        inputs = self._inputs([prefix], 1, capacity_bucket(len(before) + plan.path_rows + 1), config)
        state = self._call(core.prefill, (self.weights, *inputs), clock, plan=plan.for_prefill())
        state = state.replace(tokens_bs=state.tokens_bs.at[0, len(before)].set(anchor))
        tree = self._call(core.draft, (self.weights, state), clock, plan=plan)
        if nodes is not None:
            tree = trees.first(tree, nodes[round_index])
        label = str if self.tokenizer is None else lambda token: repr(self.tokenizer.inner.decode([token]))
        return drawn_tree(tree, ids[start:], accepted[round_index], label)

    def _decode(self, ids: list[int]) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.decode(ids)


@jax.jit
def _row_keys(seed_b: jax.Array, index_b: jax.Array) -> jax.Array:
    return jax.vmap(lambda seed, index: jax.random.fold_in(jax.random.key(seed), index))(seed_b, index_b)


def _compile_note() -> str:
    folder = jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir
    kept = f"kept in {folder}" if folder else "kept until this process ends"
    return f"compiling, once for this batch size, length and tree; programs are {kept}"


def _uncertain(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of a growing text that may still change: half a character, or the start of a stop string."""
    held = len(text) - len(text.rstrip("\ufffd"))
    for stop in stops:
        for size in range(1, len(stop)):
            if text.endswith(stop[:size]):
                held = max(held, size)
    return held


def _warn_if_wiring_looks_wrong(results: list[Result], plan: DecodePlan) -> None:
    rounds = [
        length
        for result in results
        for length, nodes in zip(result.accepted_before_cut, result.nodes or [2] * len(result.accept_lengths), strict=True)
        if nodes > 1
    ]
    if plan.drafts and plan.num_nodes > 1 and len(rounds) >= LOW_TAU_ROUNDS:
        tau = sum(rounds) / len(rounds)
        if tau < LOW_TAU:
            warnings.warn(
                f"tau is {tau:.2f} over {len(rounds)} rounds, expected above {LOW_TAU}: a drafter that was trained for "
                "another verifier, revision or prompt format looks like this",
                stacklevel=3,
            )
