"""One lock for whatever only one command may write at a time: a run, a file of answers, a pair; here or on gs://.

The lock is a small JSON file that names the host and the process that holds it. Its holder renews it all the time, so that
whoever finds it can tell a live holder from one that was killed: on the same host by the process, elsewhere by the lock
having stopped to change.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from train import folders, hosts
from treeflash_jax import files

RENEWED = 10.0  # seconds between two signs of life
STALE = 60.0  # seconds without one, after which a lock of another host is taken over
LONG_STALE = 3600.0  # by the clocks of both hosts, however far they are apart: nothing to wait for


@contextmanager
def held(path: epath.Path, what: str) -> Iterator[Lock]:
    """Holds the lock of `path` while the block runs, on behalf of all hosts of this job.

    Example:
      >>> with lock.held(folder / "run.lock", "runs/head") as mine:
      ...     mine.check()  # before every write that another holder must not see

    Args:
      path: of the lock's own file; its folder is made if it is missing.
      what: is locked, for messages.

    Raises:
      ValueError: another process works on it, or the lock cannot be written; on every host of the job.
    """
    lock = Lock(path, what)
    error: ValueError | None = None
    if hosts.is_first():
        try:
            lock.acquire()
        except ValueError as refused:
            error = refused
        except OSError as refused:
            error = ValueError(f"{path} cannot be written ({refused.strerror or refused}); give another place")
    if jax.process_count() > 1:
        is_free = multihost_utils.broadcast_one_to_all(np.int32(error is None))
        if not is_free and error is None:
            error = ValueError(f"{what}: another process works on it; see the first host's message")
    if error is not None:
        raise error
    try:
        yield lock
    finally:
        lock.release()


class Lock:
    """The lock of one process; `held` is the way to use it."""

    def __init__(self, path: epath.Path, what: str):
        self.path, self.what = epath.Path(path), what
        self.token = uuid.uuid4().hex
        self.is_remote = folders.is_remote(self.path)
        self.ended = threading.Event()
        self.was_lost = False
        self.renewing: threading.Thread | None = None

    def acquire(self) -> None:
        """Writes the lock, unless a live process holds it.

        Raises:
          ValueError: one does.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while not self._create():
            found = self._read()
            if found is not None and not self._is_stale(found):
                raise ValueError(
                    f"{self.what}: process {found.get('pid')} on {found.get('host')} works on it; wait until it has ended, "
                    f"or stop it (if there is no such process, delete {self.path})"
                )
            if found is not None:
                self._remove(found)
        self.renewing = threading.Thread(target=self._renew, daemon=True)
        self.renewing.start()

    def check(self) -> None:
        """Raises ValueError where another process took the lock over, as after this one was suspended for long."""
        if self.was_lost:
            raise ValueError(f"{self.what}: another process took over while this one was suspended; nothing is written")

    def release(self) -> None:
        """Removes the lock, if this process still holds it."""
        self.ended.set()
        if self.renewing is None:
            return
        self.renewing.join()
        found = self._read()
        if found is not None and found.get("token") == self.token:
            self.path.unlink(missing_ok=True)

    def _content(self) -> str:
        pid = os.getpid()
        mine = {
            "host": this_host(),
            "pid": pid,
            "started": files.state_of(pid)[1],
            "token": self.token,
            "seen": time.time(),
        }
        return json.dumps(mine) + "\n"

    def _create(self) -> bool:
        """Whether the lock is this process's now."""
        if self.is_remote:  # object stores cannot say "only where there is none": the last of several writers wins
            if self.path.exists():
                return False
            self.path.write_text(self._content())
            time.sleep(1)
            return (self._read() or {}).get("token") == self.token
        try:
            with open(self.path, "x", encoding="utf-8") as file:
                file.write(self._content())
        except FileExistsError:
            return False
        return True

    def _read(self) -> dict[str, Any] | None:
        """What the lock says; None where there is none, {} where it says nothing."""
        try:
            if not self.is_remote:
                files.regular(self.path)
            found = json.loads(self.path.read_text())
        except FileNotFoundError:
            return None
        except (json.JSONDecodeError, UnicodeDecodeError):
            return {}
        return found if isinstance(found, dict) else {}

    def _is_stale(self, found: dict[str, Any]) -> bool:
        """Whether its holder has ended. A holder elsewhere is watched until it gives a sign of life, or for long enough."""
        pid, seen = found.get("pid"), found.get("seen")
        if found.get("host") == this_host() and isinstance(pid, int):
            started = files.state_of(pid)[1]
            return not files.is_running(pid) or started != found.get("started", started)
        if isinstance(seen, int | float) and time.time() - seen > LONG_STALE:
            return True
        holder = f"process {pid} on {found.get('host')}"
        hosts.say(f"{self.what}: locked by {holder}; waiting up to {STALE:.0f} s for a sign of life")
        since = time.monotonic()
        while time.monotonic() - since < STALE:
            time.sleep(min(1.0, STALE / 10))
            if self._read() != found:
                return False
        return True

    def _remove(self, found: dict[str, Any]) -> None:
        """Takes a stale lock away, and no other that came in its place meanwhile."""
        if self.is_remote:
            if self._read() == found:
                self.path.unlink(missing_ok=True)
            return
        aside = self.path.with_name(f"{self.path.name}.{self.token}")
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:
            return
        if Lock(aside, self.what)._read() != found:
            try:
                os.link(aside, self.path)
            except OSError:
                pass  # another process was quicker
        aside.unlink()

    def _renew(self) -> None:
        while not self.ended.wait(RENEWED):
            try:
                found = self._read()
                if found is not None and found.get("token") not in (None, self.token):
                    self.was_lost = True
                    return
                if self.is_remote:
                    self.path.write_text(self._content())
                else:
                    files.write(self.path, self._content())
            except (OSError, ValueError):
                pass  # a disk that is full or away for a moment; the next sign of life may get through


def this_host() -> str:
    """This machine and its process numbers: containers of one host name count their processes apart."""
    try:
        space = re.sub(r"\D", "", os.readlink("/proc/self/ns/pid"))
    except OSError:
        space = ""
    return f"{socket.gethostname()}/{space}" if space else socket.gethostname()
