"""Locks on outputs that only one command may write at a time: a run, a file of answers, a pair.

A local lock is the operating system's, which releases it when the process ends. Object stores have no locks: the newest
process owns an output through a file with its token, and an older one stops before its next write.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import numpy as np
from etils import epath
from filelock import FileLock, Timeout
from jax.experimental import multihost_utils

from train.runtime import folders, hosts


@contextmanager
def held(path: epath.Path, what: str) -> Iterator[Lock]:
    """Holds the lock of `path` for all hosts of this job while the block runs.

    Example:
      >>> with lock.held(folder / "run.lock", "runs/head") as output_lock:
      ...     output_lock.check()  # before every write

    Args:
      path: lock file; its folder is created if missing.
      what: name of the output in messages.

    Raises:
      ValueError: another process holds the lock, or the file cannot be written; raised on every host.
    """
    lock, error = Lock(path, what), None
    if hosts.is_first():
        try:
            lock.acquire()
        except ValueError as refused:
            error = refused
        except OSError as refused:
            error = ValueError(f"{path} cannot be written ({refused.strerror or refused}); give another place")
    if jax.process_count() > 1:
        is_held = multihost_utils.broadcast_one_to_all(np.int32(error is None))
        if not is_held and error is None:
            error = ValueError(f"{what}: another process works on it; see the first host's message")
    if error is not None:
        raise error
    try:
        yield lock
    finally:
        if hosts.is_first():
            lock.release()


class Lock:
    """The lock of one process, made by `held`."""

    def __init__(self, path: epath.Path, what: str):
        self.path, self.what, self.token = epath.Path(path), what, uuid.uuid4().hex
        self.local = None if folders.is_remote(path) else FileLock(path, timeout=0)

    def acquire(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.local is None:
            self.path.write_text(self.token)
            return
        try:
            self.local.acquire()
        except Timeout:
            raise ValueError(
                f"{self.what}: another process works on it (it holds {self.path}); wait until it has ended, or stop it"
            ) from None

    def check(self) -> None:
        """Raises ValueError if a newer process owns the output."""
        if self.local is None and hosts.is_first() and not self._is_owned():
            raise ValueError(f"{self.what}: another process was started on it; this one stops and writes nothing more")

    def release(self) -> None:
        if self.local is None:
            if self._is_owned():
                self.path.unlink(missing_ok=True)
        else:
            self.path.unlink(missing_ok=True)  # first, since a released lock may be another process's at once
            self.local.release()

    def _is_owned(self) -> bool:
        return self.path.exists() and self.path.read_text() == self.token
