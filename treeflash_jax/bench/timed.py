"""Programs of a benchmark: compiled side by side, and timed in samples of many calls."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from treeflash_jax import devices
from treeflash_jax import mesh as meshes
from treeflash_jax.bench.progress import Tell
from treeflash_jax.costs import Work
from treeflash_jax.devices import Ceilings

CALLS = 64  # of one sample, at most
SAMPLE_SECONDS = 0.02
STAGE_SECONDS = 6.0  # slow stages get fewer samples, two at least
COMPILERS = 8  # programs compiled side by side, at most


@dataclass(frozen=True)
class Program:
    """A compiled program, and the seconds that lowering and compiling it took, others compiling beside it."""

    run: Callable[..., Any]
    compile_seconds: float


@dataclass
class Timed:
    """One stage of one configuration.

    Attributes:
      nodes: of the tree; None where the stage does not depend on it.
      work: the least it has to do.
      prepare: how many calls -> a function that enqueues them and returns what to wait for.
      least, most: calls of a sample.
      units: what a call's time is divided by (tokens of a prefill).
      calls: of one sample.
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


class Compiler:
    """Compiles programs on a few threads; the one that calls goes on with what does not wait for them."""

    def __init__(self, tell: Tell):
        self.tell, self.done = tell, 0
        self.pool = ThreadPoolExecutor(min(COMPILERS, os.cpu_count() or 1))

    def compile(self, function: Any, *args: Any, **static: Any) -> Future[Program]:
        """Lowers here, compiles on another thread."""
        since = time.perf_counter()
        lowered = function.lower(*args, **static)
        seconds = time.perf_counter() - since

        def finish() -> Program:
            since = time.perf_counter()
            program = lowered.compile(devices.here().compiler_options)
            self.done += 1
            self.tell(f"{self.done} programs compiled")
            return Program(program, seconds + time.perf_counter() - since)

        return self.pool.submit(finish)

    def each(self, function: Any, plans: Sequence[Any], args: Sequence[tuple[Any, ...]]) -> list[Program]:
        """The programs of a stage, one for every plan."""
        futures = [self.compile(function, *given, plan=plan) for plan, given in zip(plans, args, strict=True)]
        return [future.result() for future in futures]


def sample_in_turn(stages: list[Timed], repeats: int, tell: Tell) -> None:
    """Takes the samples of all stages, in an order that rotates."""
    for timed in stages:
        tell(f"trying {timed.stage}" + (f" of {timed.nodes} nodes" if timed.nodes else ""))
        timed.calibrate(repeats)
    for turn in range(repeats):
        tell(f"sample {turn + 1} of {repeats}")
        at = turn % len(stages)
        for timed in stages[at:] + stages[:at]:
            if len(timed.seconds) < timed.samples:
                timed.seconds.append(timed.sample())


@contextmanager
def running(mesh: Any, where: str) -> Iterator[None]:
    """The mesh around, and one line that says where its devices are too small.

    Raises:
      ValueError: too little memory on the devices.
    """
    try:
        with meshes.ambient(mesh):
            yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ValueError(f"{where}: the devices have too little memory for it") from None


def again(run: Callable[..., Any], args: Callable[[], tuple[Any, ...]], calls: int) -> Callable[[], Any]:
    """The same call over and over; it changes nothing."""
    given = args()

    def enqueue() -> Any:
        for _ in range(calls):
            out = run(*given)
        return out

    return enqueue
