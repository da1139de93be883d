"""Compiled programs, timed in samples of many calls."""

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treeflash_jax.core import programs, sharding
from treeflash_jax.core.checks import clipped

CALLS = 64  # maximal number of calls in a sample
SAMPLE_SECONDS = 0.02
PHASE_SECONDS = 6.0  # slow phases get fewer samples, at least two


def print_progress(text: str) -> None:
    print(clipped(text), file=sys.stderr)


@dataclass
class Timed:
    """One phase of one configuration.

    Attributes:
      nodes: nodes of the tree; None if the phase does not depend on them.
      prepare: returns, for a number of calls, a function that enqueues them and returns an array to wait for.
      least, most: limits of `calls`, the number of calls per sample.
      units: divides the time of a call (tokens of a prefill).
      reads: bytes of the arrays that a call reads on one device.
      seconds: time of one unit, per sample.
    """

    phase: str
    nodes: int | None
    prepare: Callable[[int], Callable[[], Any]]
    least: int = 1
    most: int = CALLS
    units: int = 1
    reads: float = 0.0
    calls: int = 1
    samples: int = 1
    seconds: list[float] = field(default_factory=list)

    def sample(self) -> float:
        enqueue = self.prepare(self.calls)
        since = time.perf_counter()
        jax.block_until_ready(enqueue())
        return (time.perf_counter() - since) / self.calls / self.units

    def choose_counts(self, repeats: int) -> None:
        """Chooses the numbers of samples and of calls per sample."""
        self.calls, self.seconds = self.least, []
        seconds = min(self.sample(), self.sample()) * self.units
        self.calls = max(self.least, min(self.most, math.ceil(SAMPLE_SECONDS / seconds)))
        self.samples = min(repeats, max(2, int(PHASE_SECONDS / (self.calls * seconds))))

    def summarise(self, bytes_per_second: float) -> dict[str, Any]:
        """Returns milliseconds (median and quartiles) of one call or token, and its floor: those of its reads."""
        size = self.reads / self.units
        low, median, high = (1e3 * float(x) for x in np.percentile(self.seconds, (25, 50, 75)))
        times = {"ms": median, "low_ms": low, "high_ms": high, "floor_ms": 1e3 * size / bytes_per_second}
        counts = {"bytes": size, "samples": len(self.seconds), "calls": self.calls}
        return {"phase": self.phase, "nodes": self.nodes} | times | counts


def measure_copies() -> float:
    """Measures the bytes per second of a large copy on the first device; each byte counts twice, as read and as written."""
    size = 2**30
    negate = programs.jit(jnp.negative, donate_argnums=0)  # in place, so that a CPU does not spend the time on fresh pages
    numbers, seconds = programs.jit(lambda: jnp.arange(size // 4, dtype=jnp.float32))(), []
    for _ in range(8):
        jax.block_until_ready(numbers)
        since = time.perf_counter()
        numbers = jax.block_until_ready(negate(numbers))
        seconds.append(time.perf_counter() - since)
    return 2 * size / float(np.median(seconds[1:]))  # the first sample compiles


def sample_in_turns(phases: Sequence[Timed], repeats: int) -> None:
    """Takes up to `repeats` samples of every phase, in turns whose order rotates."""
    for timed in phases:
        timed.choose_counts(repeats)
    for turn in range(repeats):
        first = turn % len(phases)
        for timed in [*phases[first:], *phases[:first]]:
            if len(timed.seconds) < timed.samples:
                timed.seconds.append(timed.sample())


@contextmanager
def running(mesh: Any, where: str) -> Iterator[None]:
    """Enters the mesh, and turns exhausted memory into a ValueError of one line."""
    try:
        with sharding.ambient(mesh):
            yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ValueError(f"{where}: the devices have too little memory for it") from None
