"""Time since a start, without the time of compilation, and log lines for operations that take over a second."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from treeflash_jax.core.error_text import clipped, logger

SILENT_SECONDS = 1.0


@contextmanager
def slow(text: str, level: int = logging.WARNING) -> Iterator[None]:
    """Logs `text` if the block takes longer than a second."""
    timer = threading.Timer(SILENT_SECONDS, logger.log, (level, clipped(text)))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Clock:
    """A stopwatch that stands still during compilation and pauses."""

    has_announced = False  # whether this process has logged that it compiles

    def __init__(self):
        self.compile_seconds = 0.0
        self._since = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._since

    @contextmanager
    def paused(self) -> Iterator[None]:
        since = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - since

    @contextmanager
    def compiling(self, program: str, announcement: str, always: bool = False) -> Iterator[None]:
        """Counts the time of the block as compilation, and logs `announcement` if the block takes over a second.

        Args:
          always: whether to log it also if this process has logged an earlier announcement.
        """
        since = time.perf_counter()
        with self.paused(), slow(announcement, logging.INFO) if always or not Clock.has_announced else nullcontext():
            yield
        seconds = time.perf_counter() - since
        self.compile_seconds += seconds
        Clock.has_announced |= seconds >= SILENT_SECONDS
        logger.debug("compiled %s in %.1f s", program, seconds)
