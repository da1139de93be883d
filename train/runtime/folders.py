"""Folders and files of runs and results, local or at a URL such as gs://bucket/run."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
from etils import epath

from treeflash_jax.core import files

# gcsfs would cache listings for ever, but other processes write to the same folders.
fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)


def is_remote(path: str | os.PathLike) -> bool:
    return "://" in os.fspath(path)


def absolute(path: str | os.PathLike) -> epath.Path:
    """Returns an absolute path, which Orbax requires, or a URL unchanged. Raises ValueError if it cannot be opened."""
    if not is_remote(path):
        return epath.Path(os.path.abspath(os.path.expanduser(path)))
    try:
        epath.Path(path).exists()
    except (ImportError, KeyError, NotImplementedError) as error:
        scheme, reason = os.fspath(path).partition("://")[0], str(error).splitlines()[0]
        raise ValueError(
            f"{path}: {scheme}:// cannot be opened here ({reason}); gs:// needs pip install treeflash-jax[gcs]"
        ) from None
    return epath.Path(path)


def local(path: str | os.PathLike) -> Path:
    """Returns a path on this machine. Raises ValueError for a URL."""
    if is_remote(path):
        raise ValueError(f"got {path}, expected a local folder; copy it to the URL when it is finished")
    return Path(path).expanduser()


def check(target: str | os.PathLike, *, overwrite: bool = False) -> None:
    """Refuses a folder that `filled` would refuse; see `files.check_folder`."""
    if not is_remote(target):
        files.check_folder(target, overwrite=overwrite)
    elif absolute(target).exists() and any(absolute(target).iterdir()) and not overwrite:
        raise ValueError(f"{target} exists; give a new folder")


@contextmanager
def filled(target: str | os.PathLike, *, overwrite: bool = False) -> Iterator[Path]:
    """Yields a local folder to write into; its files are moved or uploaded to `target` at the end, unless writing fails.

    Raises ValueError as `check`, and for a folder that cannot be written.
    """
    if not is_remote(target):
        with files.filled(target, overwrite=overwrite) as folder:
            yield folder
        return
    check(target, overwrite=overwrite)
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)
        inside = (path for path in Path(name).rglob("*") if path.is_file())
        for path in sorted(inside, key=lambda path: (path.name == files.LAST, path)):
            copy = epath.Path(target) / path.relative_to(name).as_posix()
            copy.parent.mkdir(parents=True, exist_ok=True)
            epath.Path(path).copy(copy, overwrite=True)


def append(path: epath.Path, text: str) -> None:
    """Appends to a file; a remote file, which cannot grow, is rewritten."""
    if is_remote(path):
        path.write_text((path.read_text() if path.exists() else "") + text)
    else:
        with files.naming(path), path.open("a") as file:
            file.write(text)


def write(path: epath.Path, content: str | bytes) -> None:
    """Writes a file whole or not at all, as object stores do by themselves."""
    if is_remote(path):
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    else:
        files.write(path, content)
