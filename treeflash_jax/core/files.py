"""Files and folders on this machine or at a URL such as gs://bucket/run. Outputs appear as a whole or not at all.

`write` (one file) and `filled` (a folder) write beside their target and then rename. So neither a kill nor a full disk
leaves half a file under the final name, and no link is followed. Object stores write files as a whole by themselves.
"""

import glob
import hashlib
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from treeflash_jax.core.checks import expect
from treeflash_jax.core.error_text import LONGEST_PATH, clipped

WRITTEN_LAST = "config.json"  # a folder without it is no model
MODEL_FILES = r"(assistant/)?[^/]+\.(json|safetensors|jinja|gguf)"  # "original" would hold the same weights again
PART = re.compile(r"\..+\.part-[0-9a-f]{16}")  # names of unfinished outputs
DAY = 24 * 60 * 60


def user_cache() -> Path:
    """Returns the cache folder of this package. Raises RuntimeError if the user has no home folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "treeflash"


def is_remote(path: str | os.PathLike) -> bool:
    return "://" in os.fspath(path)


def absolute(path: str | os.PathLike) -> Any:
    """Returns an epath.Path for a URL or an absolute path, as Orbax requires. Raises ValueError if it cannot be opened."""
    from etils import epath  # only training needs it

    if not is_remote(path):
        return epath.Path(os.path.abspath(os.path.expanduser(path)))
    import fsspec  # slow to import

    # gcsfs keeps listings for ever by default, but other processes write to the same folders. epath passes it no options.
    fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
    try:
        epath.Path(path).exists()
    except (ImportError, KeyError, NotImplementedError) as error:
        scheme = os.fspath(path).partition("://")[0]
        reason = str(error).splitlines()[0]
        expected = "" if isinstance(error, ImportError) else "; expected a local path or a URL like gs://bucket/run"
        raise ValueError(f"{path}: {scheme}:// cannot be opened here ({reason}){expected}") from None
    return epath.Path(path)


def local(path: str | os.PathLike) -> Path:
    """Returns a path on this machine, with the home folder for ~. Raises ValueError for a URL."""
    if is_remote(path):
        raise ValueError(f"got {path}, expected a local path; copy it to the URL when it is finished")
    return Path(os.path.expanduser(path))


def fetch(url: str, wanted: str = MODEL_FILES) -> Path:
    """Returns a local copy of the file or folder at a URL such as gs://bucket/drafter; downloads it again if it changed.

    Args:
      wanted: regular expression for the names, relative to the folder, of the files to copy from it.

    Raises FileNotFoundError if there is none. Raises ValueError if it cannot be read, or if a name leads out of the folder.
    """
    import fsspec  # slow to import
    from filelock import FileLock

    try:
        system, source = fsspec.url_to_fs(url, use_listings_cache=False)
        entries = system.find(source, detail=True)
        names = {path: path.removeprefix(source.rstrip("/")).lstrip("/") for path in entries}  # "" for a single file
        for name in names.values():
            expect(".." not in re.split(r"[/\\]", name), "the name", name, "one inside the folder")
        names = {path: name for path, name in names.items() if not name or re.fullmatch(wanted, name)}
        if not names:
            raise FileNotFoundError("no such file or folder")
        folder = user_cache() / "downloads" / _digest(url.rstrip("/"))
        target = folder / _digest(sorted(entries.items())) / (Path(source).name or "folder")
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            if not target.parent.exists():
                for old in folder.iterdir():
                    if old.stat().st_mtime < time.time() - DAY:  # another process may still read one used since
                        shutil.rmtree(old)
                with filled(target.parent) as part:
                    for path, name in names.items():
                        copy = part / target.name / name
                        copy.parent.mkdir(parents=True, exist_ok=True)
                        system.get_file(path, str(copy))
            os.utime(target.parent)  # the time of its last use
    except Exception as error:  # file systems of different packages raise different classes
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
        reason = clipped(str(error) or type(error).__name__, 120)  # for example, "Please install gcsfs to access ..."
        raise kind(f"{clipped(url, LONGEST_PATH)} cannot be read ({reason})") from None
    return target


def check_output(path: str | os.PathLike) -> None:
    """Checks before a computation that its output file can be written. Writes nothing.

    Raises FileNotFoundError if the parent folder does not exist, and ValueError for anything but a writable regular file.
    """
    path = local(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"cannot write {path}: it is no regular file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: No such file or directory")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"cannot write {path}: Permission denied")


def write(path: str | os.PathLike, content: str | bytes | Iterable[bytes | memoryview]) -> None:
    """Writes a file as a whole or not at all, replacing a file or link of this name. Raises ValueError if that fails.

    Args:
      content: text, bytes, or buffers to write one after another.
    """
    content = content.encode() if isinstance(content, str) else content
    pieces = [content] if isinstance(content, bytes) else content
    if is_remote(path):
        absolute(path).write_bytes(b"".join(pieces))
        return
    path = Path(os.path.abspath(local(path)))
    with errors_named(path):
        part = _part(path.parent, path.name)
        try:
            with part.open("wb") as file:
                file.writelines(pieces)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


def append(path: str | os.PathLike, text: str) -> None:
    """Appends to a file. A remote file cannot grow, so it is rewritten."""
    if is_remote(path):
        remote = absolute(path)
        remote.write_bytes((remote.read_bytes() if remote.exists() else b"") + text.encode())
    else:
        with errors_named(path), open(local(path), "a", encoding="utf-8") as file:
            file.write(text)


@contextmanager
def held(path: str | os.PathLike, what: str) -> Iterator[None]:
    """Holds the lock file `path`, in a folder created if missing, while the block runs.

    The operating system releases the lock when the process ends. Raises ValueError if another process holds the lock, or if
    the folder cannot be written. `what` is the name of the lock in messages.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path, timeout=0)
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        got = f"{what}: another process works on it (it holds {path})"
        raise ValueError(f"{got}; wait until it has ended, or stop it") from None
    except OSError as refused:
        raise ValueError(f"{path} cannot be written ({refused.strerror or refused}); give another place") from None
    try:
        yield
    finally:
        Path(path).unlink(missing_ok=True)  # before the release: later, another process may own it
        lock.release()


def check_folder(target: str | os.PathLike, *, overwrite: bool = False) -> None:
    """Checks that `filled` can write a folder. Writes nothing.

    Raises ValueError for a file or a link, and for a folder that contains files unless `overwrite` is set.
    """
    if is_remote(target):
        if not overwrite and absolute(target).exists() and any(absolute(target).iterdir()):
            raise ValueError(f"{target} exists; give a new folder")
        return
    target = local(target)
    if target.is_dir() and not target.is_symlink():
        if not (overwrite or is_empty(target)):
            raise ValueError(f"{target} exists; give a new folder")
    elif os.path.lexists(target):
        raise ValueError(f"{target} exists and is no folder but a file or a link; give a new folder")


def is_empty(folder: Any) -> bool:
    """Returns whether a folder, any epath.Path, contains nothing but unfinished outputs of killed processes."""
    return all(PART.fullmatch(entry.name) for entry in folder.iterdir())


@contextmanager
def filled(target: str | os.PathLike, *, overwrite: bool = False) -> Iterator[Path]:
    """Yields a local folder to write into. Its files appear in `target` at the end, or not at all if writing fails.

    A new folder appears as a whole. If the folder exists, or is at a URL, files are moved one by one, config.json last, and
    files of other names stay.

    Raises ValueError as `check_folder` does, and if the folder cannot be written.
    """
    check_folder(target, overwrite=overwrite)
    if is_remote(target):
        with tempfile.TemporaryDirectory() as name:
            yield Path(name)
            _upload(Path(name), str(target))
        return
    target = Path(os.path.abspath(local(target)))
    exists = target.is_dir()
    with errors_named(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        part = _part(target if exists else target.parent, target.name)
        part.mkdir()
    try:
        yield part
        with errors_named(target):
            _move(part, target) if exists else os.rename(part, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def errors_named(target: str | os.PathLike) -> Iterator[None]:
    """Converts an OSError of the block, such as a full disk, to a ValueError with the name of the target."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot write {target}: {error.strerror or error}") from None


def _digest(value: Any) -> str:
    return hashlib.sha256(str(value).encode()).hexdigest()[:16]


def _names(folder: Path) -> list[Path]:
    """Returns the names of all files in a folder and its subfolders, config.json last."""
    inside = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(inside, key=lambda name: (name.name == WRITTEN_LAST, name))


def _upload(folder: Path, url: str) -> None:
    """Copies all files of a local folder to a URL, config.json last."""
    import fsspec  # slow to import

    system, target = fsspec.url_to_fs(url)
    for name in _names(folder):
        system.put_file(str(folder / name), f"{target}/{name.as_posix()}")


def _move(part: Path, target: Path) -> None:
    """Moves all files of one folder into another, config.json last."""
    names = _names(part)
    for name in names:
        if (target / name).is_dir():
            raise ValueError(f"{target / name} is a folder, expected a file or none; give a new folder")
    if Path(WRITTEN_LAST) in names:
        (target / WRITTEN_LAST).unlink(missing_ok=True)
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(part / name, target / name)


def _part(folder: Path, name: str) -> Path:
    """Returns a new path for an unfinished `name` in `folder`. Removes what processes killed over a day ago left there."""
    for path in folder.glob(f".{glob.escape(name)}.part-*"):
        if PART.fullmatch(path.name) and path.stat().st_mtime < time.time() - DAY:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return folder / f".{name}.part-{secrets.token_hex(8)}"
