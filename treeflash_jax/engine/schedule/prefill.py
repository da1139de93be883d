"""Reading of prompts by the programs of a plan, a few chunks per dispatch."""

import time
from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np

from treeflash_jax.core import programs, sharding
from treeflash_jax.core.error_text import logger
from treeflash_jax.decoding import loops
from treeflash_jax.decoding.state import DecodeState
from treeflash_jax.drafters.protocol import State
from treeflash_jax.engine.schedule.batching import Batch
from treeflash_jax.engine.schedule.runner import Runner
from treeflash_jax.models.caches import Cache

REPORT_SECONDS = 2.0  # time between two log lines about the same prompt


class PrefixCaches(NamedTuple):
    """Caches of earlier texts that begin like the prompts of a batch.

    Attributes:
      cache, drafter: as in `DecodeState`, one sequence for each prompt; donated.
      count_b: number of positions to keep for each prompt, less than its length.
      capacity: capacity of the caches.
    """

    cache: Cache
    drafter: State | None
    count_b: np.ndarray
    capacity: int


class Prefill:
    """Reads the prompts of a batch into its caches, some chunks per dispatch.

    Other sequences can be decoded between two dispatches.

    Args:
      prefixes: caches of the same capacity to begin with; None: empty ones.
      first_b: first tokens of the answers if they are known; None: sampled.
      will_decode: whether rounds of the same batch follow; if so, their program is compiled at the same time.
      scores: whether to record the log-probabilities of the prompts' tokens.

    Attributes:
      num_reused_b: number of prompt tokens of each sequence that are reused from caches.
      state: state after the chunks read so far; complete with the first tokens after the last one.
    """

    def __init__(
        self,
        runner: Runner,
        batch: Batch,
        prefixes: PrefixCaches | None = None,
        *,
        first_b: jax.Array | None = None,
        will_decode: bool = False,
        scores: bool = False,
    ):
        self._runner = runner
        self._first_b = first_b
        self._plan = replace(runner.plan.shared, scores_prompts=scores)
        self._length_b = batch.length_b
        length_b = sharding.to_host(batch.length_b)
        kept = kept_b = None
        self.num_reused_b = np.zeros_like(length_b)
        if prefixes is not None:
            self.num_reused_b = prefixes.count_b
            kept = prefixes.cache, prefixes.drafter
            kept_b = sharding.place(jax.device_put(prefixes.count_b.astype(np.int32)), runner.mesh)
        self._longest = int(np.max(length_b))
        self._position = self._longest - int(np.max(length_b - self.num_reused_b))
        self._chunk = self._plan.chunk_size(batch.tokens_bs.shape[1])

        def start() -> DecodeState:
            return runner.call(
                loops.init_state,
                *batch,
                kept,
                kept_b,
                runner.weights.processor,
                plan=runner.plan.shared,
                dtype=runner.weights.dtype,
                can_cut=runner.can_cut,
            )

        self.state: DecodeState = start()
        compiling = self._start_compiling(will_decode)
        if prefixes is None and not all(program.has_run for program in compiling):
            self._run_once(compiling)
            self.state = start()  # the runs took the first one
        else:
            programs.wait(*compiling, clock=runner.clock)
        self._reported = time.perf_counter()

    @property
    def is_complete(self) -> bool:
        return self._position >= self._longest

    def read(self, passes: int) -> None:
        """Reads up to `passes` chunks of every prompt; waits until they are read."""
        if time.perf_counter() - self._reported >= REPORT_SECONDS:
            logger.warning("reading the prompt: %s of %s tokens", f"{self._position:,}", f"{self._longest:,}")
            self._reported = time.perf_counter()
        self.state = self._read(passes)
        jax.block_until_ready(self.state)
        self._position += passes * self._chunk

    def read_all(self) -> DecodeState:
        """Reads the whole prompts; returns the state after them."""
        while not self.is_complete:
            self.read(self._plan.prefill_passes)
        return self.state

    def _read(self, passes: int) -> DecodeState:
        runner = self._runner
        max_passes = jax.device_put(np.int32(passes))
        return runner.call(
            loops.prefill_chunks, runner.weights, self.state, self._length_b, max_passes, self._first_b, plan=self._plan
        )

    def _start_compiling(self, will_decode: bool) -> list[programs.Program]:
        runner = self._runner
        unit = jax.device_put(np.int32(1))
        # While XLA compiles the first program, or reads it from JAX's cache, Python traces the second.
        arguments = runner.weights, self.state, self._length_b, unit, self._first_b
        compiling = [runner.start_compiling(loops.prefill_chunks, *arguments, plan=self._plan)]
        if will_decode:
            compiling.append(runner.start_compiling(loops.decode, runner.weights, self.state, unit, unit, plan=runner.plan))
        return compiling

    def _run_once(self, compiling: list[programs.Program]) -> None:
        """Runs each program once, as soon as it is compiled.

        XLA for CPUs loads the code of loop bodies in the first run, and the clock counts this run as compilation. The first
        run of the prefill overlaps with the compilation of rounds.
        """
        runner, state = self._runner, self.state
        unit = jax.device_put(np.int32(1))
        for program in programs.as_compiled(*compiling, clock=runner.clock):
            with runner.clock.compiling("first run", "running new programs once"):
                if program.function is loops.decode:
                    state = runner.call(loops.decode, runner.weights, state, unit, unit, plan=runner.plan)
                else:
                    state = self._read(passes=1)
                jax.block_until_ready(state)
