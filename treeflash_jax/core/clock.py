"""Decoding time, with compilation counted separately, and log lines about operations that take over a second."""

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

from treeflash_jax.core.checks import clipped

logger = logging.getLogger("treeflash_jax")
SILENT_SECONDS = 1.0
REPORT_SECONDS = 2.0  # between two log lines about the same prompt


@contextmanager
def slow(text: str) -> Iterator[None]:
    """Logs `text` if the block takes longer than a second."""
    timer = threading.Timer(SILENT_SECONDS, logger.warning, (clipped(text),))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Clock:
    """A running stopwatch; `seconds` is the time until the last stop or pause. `silent` announces no compilation."""

    def __init__(self, silent: bool = False):
        self.seconds = self.compile_seconds = 0.0
        self.has_announced = silent  # only the first slow compilation is announced
        self.start()

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> None:
        self.seconds += time.perf_counter() - self._since

    def reading(self, positions: Iterable[int], length: int) -> Iterator[int]:
        """Yields the positions of a prompt during prefill; logs one every few seconds."""
        reported = time.perf_counter()
        for position in positions:
            if time.perf_counter() - reported >= REPORT_SECONDS:
                reported = time.perf_counter()
                logger.warning("reading the prompt: %s of %s tokens", f"{position:,}", f"{length:,}")
            yield position

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.stop()
        try:
            yield
        finally:
            self.start()

    @contextmanager
    def compiling(self, program: str, announcement: str) -> Iterator[None]:
        """Counts the time of the block as compilation; logs `announcement` once if that takes longer than a second."""
        with self.paused(), nullcontext() if self.has_announced else slow(announcement):
            since = time.perf_counter()
            yield
            seconds = time.perf_counter() - since
        self.compile_seconds += seconds
        self.has_announced |= seconds >= SILENT_SECONDS
        logger.info("compiled %s in %.1f s", program, seconds)
