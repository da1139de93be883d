"""Files and folders: only regular files are read, what is written is whole or absent, and nothing foreign is replaced.

Whatever this project writes for a user goes through `write` (one file) or `filled` (a folder). Both write beside their
target and rename, so that neither a kill nor a full disk leaves half a file under its name, and no link is followed.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

STREAMS = ("/dev/fd/", "/dev/stdin")  # what a shell has opened already
LAST = "config.json"  # of a folder's files; without it no folder is read as a model


def regular(path: str | os.PathLike, *, streams: bool = False) -> Path:
    """The path, unless opening it could wait for ever.

    Args:
      path: of a file that is to be read; one that is missing, or a folder, is left to whoever opens it.
      streams: accept what a shell has opened, as in `--prompt-file <(command)`.

    Raises:
      ValueError: a named pipe, a socket or a device.
    """
    path = Path(path)
    if streams and str(path).startswith(STREAMS):
        return path
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return path
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        kind = "a named pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
        raise ValueError(f"{path} is {kind}, expected a regular file")
    return path


def check_output(path: str | os.PathLike, own: Callable[[bytes], bool] | None = None) -> None:
    """Refuses, before anything is computed, a file that could not or must not be written in the end. Writes nothing.

    Args:
      own: whether what the file holds is a result of this command, which may be replaced; None: not asked.

    Raises:
      ValueError: no folder to write in, no regular file, or a file that holds something else.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"cannot write {path}: Is a directory")
    if not path.parent.is_dir():
        raise ValueError(f"cannot write {path}: No such file or directory")
    regular(path)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"cannot write {path}: Permission denied")
    content = path.read_bytes() if own is not None and path.exists() else b""
    if content and not own(content):
        raise ValueError(f"{path} holds something else than results of this command; write to another file")


def json_with(*names: str, inside: bool = False) -> Callable[[bytes], bool]:
    """For `check_output`: whether a file holds a JSON object with these keys.

    Args:
      names: keys that it has, whatever else it has.
      inside: every value of the object is an object with these keys.
    """

    def has_names(value: Any) -> bool:
        return isinstance(value, dict) and set(names) <= value.keys()

    def own(content: bytes) -> bool:
        try:
            held = json.loads(content)
        except (ValueError, RecursionError):
            return False
        return isinstance(held, dict) and all(map(has_names, held.values() if inside else [held]))

    return own


def write(path: str | os.PathLike, content: str | bytes) -> None:
    """Writes a file that is whole or absent, in place of one of this name; a link is replaced, not followed.

    Raises:
      ValueError: the file cannot be written; what was there stays.
    """
    path = Path(os.path.abspath(path))
    with _one_line(path):
        part = _part(path.parent, path.name)
        try:
            part.write_bytes(content.encode() if isinstance(content, str) else content)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


def check_folder(target: str | os.PathLike, *, overwrite: bool = False, own: Callable[[Path], bool] | None = None) -> None:
    """Refuses a folder that `filled` would have to refuse. Writes nothing.

    Args:
      target: new or empty, unless `overwrite` is set.
      overwrite: files may be replaced.
      own: with `overwrite`, whether what lies in the folder may be replaced; None: not asked.

    Raises:
      ValueError: a file, a link, or a folder with files in it that must stay.
    """
    target = Path(target)
    if target.is_dir() and not target.is_symlink():
        if not any(not _PART.fullmatch(entry.name) for entry in target.iterdir()):
            return
        if not overwrite:
            raise ValueError(f"{target} exists; give a new folder")
        if own is not None and not own(target):
            raise ValueError(f"{target} holds files that treeflash_jax did not write; give a new folder")
    elif os.path.lexists(target):
        raise ValueError(f"{target} exists and is no folder but a file or a link; give a new folder")


@contextmanager
def filled(
    target: str | os.PathLike, *, overwrite: bool = False, own: Callable[[Path], bool] | None = None
) -> Iterator[Path]:
    """A folder to write into, whose files lie in `target` at the end, and nothing of them where writing fails.

    A new folder appears as a whole. In an existing one the files are renamed one by one, config.json at the end.

    Args:
      target, overwrite, own: as `check_folder` has them; files of other names stay where they are.

    Raises:
      ValueError: as `check_folder`, or a folder that cannot be written.
    """
    target = Path(os.path.abspath(target))
    check_folder(target, overwrite=overwrite, own=own)
    exists = target.is_dir()
    with _one_line(target):
        if not exists:
            target.parent.mkdir(parents=True, exist_ok=True)
        part = _part(target if exists else target.parent, target.name)
        part.mkdir()
    try:
        yield part
        with _one_line(target):
            if exists:
                _move(part, target)
            else:
                os.rename(part, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def _one_line(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot write {target}: {error.strerror or error}") from None


def _move(part: Path, target: Path) -> None:
    """Moves all files of one folder into another, the one that makes it a model at the end."""
    inside = (path.relative_to(part) for path in part.rglob("*") if path.is_file())
    names = sorted(inside, key=lambda name: (name.name == LAST, name))
    for name in names:
        if (target / name).is_dir():
            raise ValueError(f"{target / name} is a folder, expected a file or none; give a new folder")
    if Path(LAST) in names:
        (target / LAST).unlink(missing_ok=True)
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(part / name, target / name)


def is_running(pid: int) -> bool:
    """Whether a process of this machine is there and has not ended."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return state_of(pid)[0] not in ("Z", "X")


def state_of(pid: int) -> tuple[str | None, str | None]:
    """A process's state letter and start time, where the system has /proc; the time tells pids that were given again."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return None, None


_PART = re.compile(r"\..+\.part-(?P<host>.+)-(?P<pid>\d+)")


def _part(folder: Path, name: str) -> Path:
    """A name in `folder` for what will be called `name`. What killed processes of this machine left there is removed."""
    host = re.sub(r"[^\w.-]", "", socket.gethostname()) or "host"
    own = folder / f".{name}.part-{host}-{os.getpid()}"
    for path in folder.glob(f".{glob.escape(name)}.part-*"):
        found = _PART.fullmatch(path.name)
        if path == own or (found and found["host"] == host and not is_running(int(found["pid"]))):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return own
