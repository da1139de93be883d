"""Folders of runs and of results: on this machine, or behind a URL such as gs://bucket/run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from etils import epath


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
        raise ValueError(f"{place}: {kind}:// cannot be opened here ({reason}); gs:// needs pip install gcsfs") from None
    return path


@contextmanager
def filled(place: str | os.PathLike) -> Iterator[Path]:
    """A local folder to write into, whose files lie in `place` at the end: `place` itself, or a copy of it that is sent."""
    if not is_remote(place):
        folder = Path(place)
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)
        for path in sorted(path for path in Path(name).rglob("*") if path.is_file()):
            target = epath.Path(place) / path.relative_to(name).as_posix()
            target.parent.mkdir(parents=True, exist_ok=True)
            epath.Path(path).copy(target, overwrite=True)
