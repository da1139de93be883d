"""Folders of runs and of results: on this machine, or behind a URL such as gs://bucket/run."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
from etils import epath

from treeflash_jax.core import files

# gcsfs would keep listings for ever, but other processes write to the same folders.
fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)


def is_remote(place: str | os.PathLike) -> bool:
    return "://" in os.fspath(place)


def absolute(place: str | os.PathLike) -> epath.Path:
    """`place` from the root, as Orbax wants it; a URL as it is.

    Raises:
      ValueError: a URL that cannot be opened here.
    """
    if not is_remote(place):
        return epath.Path(os.path.abspath(place))
    try:
        path = epath.Path(place)
        path.exists()
    except (ImportError, KeyError, NotImplementedError) as error:
        kind = os.fspath(place).partition("://")[0]
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{place}: {kind}:// cannot be opened here ({reason}); gs:// needs pip install treeflash-jax[gcs]"
        ) from None
    return path


@contextmanager
def opened(path: epath.Path) -> Iterator[BinaryIO]:
    """Opens a file to be read at any position; copies one behind a URL to this machine first."""
    with path.open("rb") as file:
        if not is_remote(path):
            yield file
            return
        with tempfile.TemporaryFile() as copy:
            shutil.copyfileobj(file, copy)
            copy.seek(0)
            yield copy


def check(place: str | os.PathLike, *, overwrite: bool = False, may_replace: Callable[[Any], bool] | None = None) -> None:
    """Refuses what `filled` would refuse, before anything is computed; as `files.check_folder`, also behind a URL."""
    if not is_remote(place):
        files.check_folder(place, overwrite=overwrite, may_replace=may_replace)
        return
    folder = absolute(place)
    if folder.exists() and any(folder.iterdir()):
        if not overwrite:
            raise ValueError(f"{place} exists; give a new folder")
        if may_replace is not None and not may_replace(folder):
            raise ValueError(f"{place} holds files that treeflash_jax did not write; give a new folder")


@contextmanager
def filled(
    place: str | os.PathLike, *, overwrite: bool = False, may_replace: Callable[[Any], bool] | None = None
) -> Iterator[Path]:
    """A local folder to write into, whose files lie in `place` at the end; nothing of them where writing fails.

    Args:
      place: here, where the files are renamed into it (`files.filled`), or behind a URL, where they are sent.
      overwrite, may_replace: as in `check`.

    Raises:
      ValueError: a place that has files already, or that cannot be written.
    """
    if not is_remote(place):
        with files.filled(place, overwrite=overwrite, may_replace=may_replace) as folder:
            yield folder
        return
    check(place, overwrite=overwrite, may_replace=may_replace)
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)
        inside = (path for path in Path(name).rglob("*") if path.is_file())
        for path in sorted(inside, key=lambda path: (path.name == files.LAST, path)):
            target = epath.Path(place) / path.relative_to(name).as_posix()
            target.parent.mkdir(parents=True, exist_ok=True)
            epath.Path(path).copy(target, overwrite=True)


def append(path: epath.Path, text: str) -> None:
    """Adds text to a file; one behind a URL, where files cannot grow, is written again."""
    if is_remote(path):
        path.write_text((path.read_text() if path.exists() else "") + text)
    else:
        with path.open("a") as file:
            file.write(text)


def write(path: epath.Path, content: str | bytes) -> None:
    """Writes a file that is whole or absent, whatever kills the process; objects behind a URL always are.

    Raises:
      ValueError: the file cannot be written.
    """
    if is_remote(path):
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    else:
        files.write(path, content)
