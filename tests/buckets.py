"""Google Cloud Storage in memory, behind gs:// URLs, without a network."""

from collections.abc import Iterator
from contextlib import contextmanager

import fsspec
import pytest
from etils.epath import backend
from fsspec.implementations.memory import MemoryFileSystem


class Bucket(MemoryFileSystem):
    protocol = ("gs", "gcs")
    store, pseudo_dirs = {}, [""]

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + path.removeprefix("gs://").strip("/")


def reopened() -> None:
    """Has etils ask fsspec again for the file system of a URL."""
    backend.fsspec_backend._get_filesystem.cache_clear()


@contextmanager
def stored() -> Iterator[dict]:
    """Yields what is stored behind gs:// URLs, by name."""
    real = fsspec.filesystem
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsspec, "filesystem", lambda name, **named: Bucket() if name == "gcs" else real(name, **named))
        patch.setattr(Bucket, "store", {})
        reopened()
        yield Bucket.store
    reopened()
