"""Locks on outputs that only one command may write at a time: a run, a file of answers, a pair."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import numpy as np
from etils import epath
from filelock import FileLock, Timeout
from jax.experimental import multihost_utils

from train.runtime import folders, hosts


@contextmanager
def held(path: epath.Path, what: str) -> Iterator[None]:
    """Holds the lock file `path`, in a folder created if missing, for all hosts of this job while the block runs.

    The operating system releases the lock when the process ends. Object stores have no locks: there nothing is held.
    Raises ValueError on every host if another process holds the lock, which messages call `what`, or for a folder that
    cannot be written.
    """
    lock, error = None, ""
    if hosts.is_first() and not folders.is_remote(path):
        lock = FileLock(path, timeout=0)
        try:
            epath.Path(path).parent.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except Timeout:
            error = f"{what}: another process works on it (it holds {path}); wait until it has ended, or stop it"
        except OSError as refused:
            error = f"{path} cannot be written ({refused.strerror or refused}); give another place"
    if jax.process_count() > 1 and not multihost_utils.broadcast_one_to_all(np.int32(not error)):
        error = error or f"{what}: another process works on it; see the first host's message"
    if error:
        raise ValueError(error)
    try:
        yield
    finally:
        if lock is not None:
            epath.Path(path).unlink(missing_ok=True)  # before the release, after which it may be another process's
            lock.release()
