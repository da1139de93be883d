"""The stages of decoding as programs of their own, and the device time of each.

What is timed is what runs: `prefill` and `decode` as they are shipped (a whole round and a one-token step are rounds of
`decode`'s own loop on the device), and the stage functions that `rounds.decode_round` is composed of, each compiled alone.

A sample is many calls enqueued back to back before the clock waits, so that dispatch is hidden behind the device. Samples
of all stages are interleaved. Buffers with a slot axis are handed from call to call as their programs donate them; all that
says how far a row has come is put back before every sample, so contexts stay within ROUNDS rounds of what they were.

Shape suffixes: b batch, s token slots, q block slots, n tree nodes, v vocabulary.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treeflash_jax import drafters
from treeflash_jax import mesh as meshes
from treeflash_jax.batching import capacity_bucket
from treeflash_jax.bench.floors import Ceilings, Work, stage_work
from treeflash_jax.bench.progress import Tell, nobody
from treeflash_jax.decoding import loops as core
from treeflash_jax.decoding.loops import DecodePlan, DecodeState
from treeflash_jax.decoding.rounds import accept_path, build_tree, commit_path, draft_stage, verify_tree
from treeflash_jax.model import TreeFlash
from treeflash_jax.planning import rows_of
from treeflash_jax.settings import GenerateConfig

ROUNDS = 16  # of one dispatch of `decode`, at most
CALLS = 64  # of one sample, at most
SAMPLE_SECONDS = 0.02
STAGE_SECONDS = 6.0  # slow stages get fewer samples, two at least
COMPILERS = 8  # programs compiled side by side, at most

DRAFT = jax.jit(draft_stage, static_argnames=("plan", "name"))
TREE = jax.jit(build_tree, static_argnames="plan")
VERIFY = jax.jit(verify_tree, static_argnames="plan")
ACCEPT = jax.jit(accept_path, static_argnames="plan")


@partial(jax.jit, static_argnames="plan", donate_argnames="slots")
def COMMIT(weights, slots, marks, verified, accepted, plan):
    """`commit_path` on a divided state, of which only the slots are donated."""
    return divide(core.pin(commit_path(weights, unite(slots, marks), verified, accepted, plan)))


copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))


def divide(state: DecodeState) -> tuple[DecodeState, DecodeState]:
    """The buffers of a state with a slot axis, and what says how far its rows are; None where the other has a value."""
    is_slots = jax.tree.map(lambda x: state.capacity in x.shape[1:], state)
    slots = jax.tree.map(lambda x, yes: x if yes else None, state, is_slots)
    return slots, jax.tree.map(lambda x, yes: None if yes else x, state, is_slots)


def unite(slots: DecodeState, marks: DecodeState) -> DecodeState:
    return jax.tree.map(lambda x, y: y if x is None else x, slots, marks, is_leaf=lambda x: x is None)


@dataclass(frozen=True)
class Program:
    """A compiled program, and the seconds that lowering and compiling it took, others compiling beside it."""

    run: Callable[..., Any]
    compile_seconds: float


@dataclass
class Timed:
    """One stage of one configuration.

    Attributes:
      stage: its name.
      nodes: of the tree; None where the stage does not depend on it.
      program: what runs.
      work: the least it has to do.
      prepare: how many calls -> a function that enqueues them and returns what to wait for.
      least, most: calls of a sample.
      units: what a call's time is divided by (tokens of a prefill).
      calls: of one sample.
      samples: how many are wanted.
      seconds: of one unit, per sample.
    """

    stage: str
    nodes: int | None
    program: Program
    work: Work
    prepare: Callable[[int], Callable[[], Any]]
    least: int = 1
    most: int = CALLS
    units: int = 1
    calls: int = 1
    samples: int = 1
    seconds: list[float] = field(default_factory=list)

    def sample(self) -> float:
        """Seconds of one unit, over one sample."""
        enqueue = self.prepare(self.calls)
        since = time.perf_counter()
        jax.block_until_ready(enqueue())
        return (time.perf_counter() - since) / self.calls / self.units

    def calibrate(self, repeats: int) -> None:
        """Chooses calls a sample, and samples."""
        self.calls, self.seconds = self.least, []
        seconds = min(self.sample(), self.sample()) * self.units
        self.calls = max(self.least, min(self.most, math.ceil(SAMPLE_SECONDS / seconds)))
        self.samples = min(repeats, max(2, int(STAGE_SECONDS / (self.calls * seconds))))

    def row(self, ceilings: Ceilings) -> dict[str, Any]:
        """The result: milliseconds (median and quartiles) of one call or token, beside their floor."""
        low, median, high = (1e3 * float(x) for x in np.percentile(self.seconds, (25, 50, 75)))
        return {
            "stage": self.stage,
            "nodes": self.nodes,
            "ms": median,
            "low_ms": low,
            "high_ms": high,
            "floor_ms": 1e3 * self.work.seconds(ceilings),
            "bytes": self.work.bytes,
            "flops": self.work.flops,
            "samples": len(self.seconds),
            "calls": self.calls,
            "compile_seconds": self.program.compile_seconds,
        }


def slots_for(context: int, plans: Sequence[DecodePlan]) -> tuple[int, int]:
    """Positions that timing at this context may come to fill, and the slots that `generate` would give them."""
    positions = context + 1 + (ROUNDS + 1) * max(plan.path_rows for plan in plans)
    return positions, capacity_bucket(positions)


class Bench:
    """Rows of one batch that have read `context` random tokens, and every stage of every plan over them, warm.

    Attributes:
      timed: the stages.
      compile_seconds: that compiling and warming up all of them took; their own seconds overlap.
    """

    def __init__(
        self,
        model: TreeFlash,
        plans: Sequence[DecodePlan],
        *,
        batch: int,
        context: int,
        temperature: float = 0.0,
        tell: Tell = nobody,
    ):
        """Compiles and runs everything once.

        Args:
          model: with its weights in place.
          plans: that draft; alike in everything but nodes.
          batch: rows decoded together, a multiple of the mesh's data axis.
          context: tokens that every row has read, at least 1.
          temperature: of the verifier; 0 is greedy.
          tell: hears how far it is.

        Raises:
          ValueError: logits that are not finite, or too little memory on the devices.
        """
        self.model, self.plans, self.weights = model, list(plans), model.weights
        self.where, self.tell = f"batch {batch}, context {context}", tell
        self.timed: list[Timed] = []
        self.compiled = 0
        positions, self.capacity = slots_for(context, plans)
        config = GenerateConfig(max_new_tokens=positions - context, temperature=temperature, stop_ids=())
        ids = np.random.default_rng(0).integers(0, model.verifier.vocab_size, (batch, context)).tolist()
        prompts = model.inputs(rows_of(ids, config, model.verifier), config, size=batch, capacity=self.capacity)
        sizes = {"batch": batch, "context": context, "dtype": model.dtype, "mesh": model.mesh}
        sizes["quantize"] = model.quantize
        works = {plan: stage_work(plan, **sizes) for plan in self.plans}
        since = time.perf_counter()
        with self._running(), ThreadPoolExecutor(min(COMPILERS, os.cpu_count() or 1)) as self.pool:
            self._build(prompts, works, tokens=batch * context)
        self.compile_seconds = time.perf_counter() - since

    def measure(self, ceilings: Ceilings, repeats: int) -> list[dict[str, Any]]:
        """A row for every stage."""
        self.sample(repeats)
        return [timed.row(ceilings) for timed in self.timed]

    def sample(self, repeats: int) -> None:
        """Times all stages in turn, in an order that rotates."""
        with self._running():
            for timed in self.timed:
                self.tell(f"trying {timed.stage}" + (f" of {timed.nodes} nodes" if timed.nodes else ""))
                timed.calibrate(repeats)
            for turn in range(repeats):
                self.tell(f"sample {turn + 1} of {repeats}")
                at = turn % len(self.timed)
                for timed in self.timed[at:] + self.timed[:at]:
                    if len(timed.seconds) < timed.samples:
                        timed.seconds.append(timed.sample())

    def trace(self, folder: str, rounds: int = 4) -> None:
        """Writes a profiler trace of a few rounds of every plan."""
        with self._running(), jax.profiler.trace(folder):
            for timed in self.timed:
                if timed.stage == "round":
                    with jax.profiler.TraceAnnotation(f"{timed.nodes} nodes"):
                        jax.block_until_ready(timed.prepare(rounds)())

    @property
    def state(self) -> DecodeState:
        return unite(self.slots, self.marks)

    def _build(self, prompts: tuple[Any, ...], works: dict[DecodePlan, dict[str, Work]], tokens: int) -> None:
        """Level by level: what a stage hands to the next has the values, and the layout, that its program gave it."""
        first, plans, weights = self.plans[0], self.plans, self.weights
        prefill = self._compile(core.prefill, weights, *prompts, plan=first.for_prefill()).result()
        self.slots, self.marks = divide(prefill.run(weights, *prompts))
        state = self.state

        one = jnp.int32(1)
        step = self._compile(core.decode, weights, state.replace(drafter=None), one, plan=first.one_token())
        rounds = [self._compile(core.decode, weights, state, one, plan=plan) for plan in plans]

        drafting, expander = [], None  # what each of the drafter's stages takes and gives
        for name in drafters.of(first.drafter).stages(first.drafter):
            program = self._compile(DRAFT, weights, state, expander, plan=first, name=name).result()
            drafting.append((name, program, expander))
            expander = program.run(weights, state, expander)
        builds = self._each(TREE, [(state, expander) for _ in plans])
        trees = [build.run(state, expander) for build in builds]
        verifies = self._each(VERIFY, [(weights, state, tree) for tree, _ in trees])
        verified = [verify.run(weights, state, tree) for verify, (tree, _) in zip(verifies, trees, strict=True)]
        if not all(bool(jnp.isfinite(each.logits_bnv).all()) for each in verified):
            raise ValueError(f"{self.where}: got logits that are not finite")
        judged = [(*pair, each.logits_bnv) for pair, each in zip(trees, verified, strict=True)]
        accepts = self._each(ACCEPT, [(state, *args) for args in judged])
        accepted = [accept.run(state, *args) for accept, args in zip(accepts, judged, strict=True)]
        kept = list(zip(verified, accepted, strict=True))
        commits = self._each(COMMIT, [(weights, self.slots, self.marks, *pair) for pair in kept])

        work = works[first]
        self._add("step", None, step.result(), work, self._rounds, False, least=4, most=ROUNDS)
        self._add("prefill", None, prefill, work, self._again, lambda: (weights, *prompts), most=4, units=tokens)
        for name, program, given in drafting:
            self._add(name, None, program, work, self._again, lambda given=given: (weights, self.state, given))
        for i, plan in enumerate(plans):
            nodes, work = plan.num_nodes, works[plan]
            tree, args, pair = trees[i][0], judged[i], kept[i]
            self._add("tree", nodes, builds[i], work, self._again, lambda: (self.state, expander))
            self._add("verify", nodes, verifies[i], work, self._again, lambda tree=tree: (weights, self.state, tree))
            self._add("accept", nodes, accepts[i], work, self._again, lambda args=args: (self.state, *args))
            self._add("commit", nodes, commits[i], work, self._onward, pair)
            self._add("round", nodes, rounds[i].result(), work, self._rounds, True, least=4, most=ROUNDS)

    def _add(
        self,
        stage: str,
        nodes: int | None,
        program: Program,
        work: dict[str, Work],
        kind: Callable[..., Callable[[], Any]],
        *args: Any,
        **sizes: int,
    ) -> None:
        """Adds a stage and warms it up.

        Raises:
          RuntimeError: a dispatch of rounds that ended before its last one: its time would be that of fewer rounds.
        """
        timed = Timed(stage, nodes, program, work[stage], partial(kind, program.run, *args), **sizes)
        self.timed.append(timed)
        if kind != self._rounds:
            jax.block_until_ready(timed.prepare(1)())
            return
        done = int(timed.prepare(timed.most)().rounds_b.min())
        if done != timed.most:
            raise RuntimeError(f"{self.where}: got {done} rounds of {stage}, expected {timed.most}")

    def _again(self, run: Callable[..., Any], args: Callable[[], tuple[Any, ...]], calls: int) -> Callable[[], Any]:
        """The same call over and over; it changes nothing."""
        given = args()

        def enqueue() -> Any:
            for _ in range(calls):
                out = run(*given)
            return out

        return enqueue

    def _onward(self, run: Callable[..., Any], pair: tuple[Any, Any], calls: int) -> Callable[[], Any]:
        """Commits at the same place over and over, each into the slots that the one before handed on."""

        def enqueue() -> Any:
            for _ in range(calls):
                self.slots, _ = run(self.weights, self.slots, self.marks, *pair)
            return self.slots

        return enqueue

    def _rounds(self, run: Callable[..., Any], drafts: bool, calls: int) -> Callable[[], Any]:
        """So many rounds in one dispatch, from where the prompts ended."""
        marks = jax.block_until_ready(copied(self.marks))  # donated
        state, count = unite(self.slots, marks), jnp.int32(calls)

        def enqueue() -> Any:
            out = run(self.weights, state if drafts else state.replace(drafter=None), count)
            self.slots = divide(out if drafts else out.replace(drafter=state.drafter))[0]
            return out

        return enqueue

    def _each(self, function: Any, args: Sequence[tuple[Any, ...]]) -> list[Program]:
        """The programs of a stage, one for every plan."""
        futures = [self._compile(function, *given, plan=plan) for plan, given in zip(self.plans, args, strict=True)]
        return [future.result() for future in futures]

    def _compile(self, function: Any, *args: Any, **static: Any) -> Future[Program]:
        """Lowers here, compiles on another thread."""
        since = time.perf_counter()
        lowered = function.lower(*args, **static)
        seconds = time.perf_counter() - since

        def finish() -> Program:
            since = time.perf_counter()
            program = lowered.compile()
            self.compiled += 1
            self.tell(f"{self.compiled} programs compiled")
            return Program(program, seconds + time.perf_counter() - since)

        return self.pool.submit(finish)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """The model's mesh around, and one line where its devices are too small."""
        try:
            with meshes.ambient(self.model.mesh):
                yield
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise ValueError(f"{self.where}: the devices have too little memory for it") from None
