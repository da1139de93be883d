"""Locks on outputs that only one command may write at a time: a run, a file of answers, a pair.

A local lock is the operating system's, which releases it when the process ends. Object stores have no locks: the newest
process owns an output through a file with its token, and an older one stops before its next write.
"""

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
import numpy as np
from etils import epath
from filelock import FileLock, Timeout
from jax.experimental import multihost_utils

from train.runtime import folders, hosts


@contextmanager
def held(path: epath.Path, what: str) -> Iterator[Callable[[], None]]:
    """Holds the lock file `path`, in a folder created if missing, for all hosts of this job while the block runs.

    Yields a function to be called before every write: it raises ValueError if a newer process owns the output, which
    messages call `what`. Raises ValueError on every host if another process holds the lock or the file cannot be written.
    """
    path, token = epath.Path(path), uuid.uuid4().hex
    local = FileLock(path, timeout=0) if hosts.is_first() and not folders.is_remote(path) else None
    error = ""

    def is_owned() -> bool:
        return local is not None or (path.exists() and path.read_text() == token)

    def check_owner() -> None:
        if hosts.is_first() and not is_owned():
            raise ValueError(f"{what}: another process was started on it; this one stops and writes nothing more")

    if hosts.is_first():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(token) if local is None else local.acquire()
        except Timeout:
            error = f"{what}: another process works on it (it holds {path}); wait until it has ended, or stop it"
        except OSError as refused:
            error = f"{path} cannot be written ({refused.strerror or refused}); give another place"
    if jax.process_count() > 1 and not multihost_utils.broadcast_one_to_all(np.int32(not error)):
        error = error or f"{what}: another process works on it; see the first host's message"
    if error:
        raise ValueError(error)
    try:
        yield check_owner
    finally:
        if hosts.is_first() and is_owned():
            path.unlink(missing_ok=True)  # before the release, after which it may be another process's
        if local is not None:
            local.release()
