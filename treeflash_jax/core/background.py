"""Compilation ahead of time, in a background thread."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax

NAME = "treeflash-ahead"  # of threads that a command does not wait for
logger = logging.getLogger("treeflash_jax")
_thread: threading.Thread | None = None


def start(job: Callable[[], Any]) -> None:
    """Runs `job` in the background unless an earlier one still runs; only logs a failure."""
    global _thread
    if _thread is not None and _thread.is_alive():
        return
    has_x64 = jax.config.jax_enable_x64  # may be a setting of the calling thread only

    def run() -> None:
        try:
            with jax.enable_x64(has_x64):
                job()
        except Exception:
            logger.info("compiling ahead failed", exc_info=True)

    _thread = threading.Thread(target=run, daemon=True, name=NAME)
    _thread.start()


@atexit.register
def wait() -> None:
    """Waits for the job: Python 3.11 aborts if a thread returns from XLA while the interpreter ends."""
    if _thread is not None:
        _thread.join()


def leave(status: int) -> None:
    """Ends the process at once if a thread of this NAME still runs."""
    if any(thread.name == NAME for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
