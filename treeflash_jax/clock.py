"""Decoding seconds, with compilation counted apart; and one line about whatever takes longer than a second."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

logger = logging.getLogger("treeflash_jax")
SILENT_SECONDS = 1.0
REPORT_SECONDS = 2.0  # between two lines about the same prompt


@contextmanager
def slow(text: str) -> Iterator[None]:
    """Logs `text` if what this surrounds is not done after a second."""
    timer = threading.Timer(SILENT_SECONDS, logger.warning, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Clock:
    """Runs from its creation; `seconds` holds what passed until the last stop or pause."""

    def __init__(self, silent: bool = False):
        self.seconds = self.compile_seconds = 0.0
        self.said_so = silent  # whether the first program that took long to compile was announced
        self.start()

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> None:
        self.seconds += time.perf_counter() - self._since

    @property
    def elapsed(self) -> float:
        """Seconds until now."""
        return self.seconds + time.perf_counter() - self._since

    def reading(self, positions: Iterable[int], length: int) -> Iterator[int]:
        """Passes on how many tokens of a prompt have been read; every few seconds, a line in the log says so."""
        reported = self.elapsed
        for position in positions:
            if self.elapsed - reported >= REPORT_SECONDS:
                reported = self.elapsed
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
        """Counts the seconds inside as compilation.

        Args:
          announcement: logged once where compilation takes longer than a second.
        """
        with self.paused(), nullcontext() if self.said_so else slow(announcement):
            since = time.perf_counter()
            yield
            seconds = time.perf_counter() - since
        self.compile_seconds += seconds
        self.said_so |= seconds >= SILENT_SECONDS
        logger.info("compiled %s in %.1f s", program, seconds)
