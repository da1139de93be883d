"""Decoding seconds, with compilation counted apart."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


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
