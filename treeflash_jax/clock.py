"""Decoding seconds, with compilation counted apart; and one line about whatever takes longer than a second."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("treeflash_jax")
SILENT_SECONDS = 1.0


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

    def __init__(self):
        self.seconds = self.compile_seconds = 0.0
        self.start()

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> None:
        self.seconds += time.perf_counter() - self._since

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.stop()
        try:
            yield
        finally:
            self.start()

    @contextmanager
    def compiling(self) -> Iterator[None]:
        with self.paused():
            since = time.perf_counter()
            yield
            self.compile_seconds += time.perf_counter() - since
