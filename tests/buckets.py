"""Google Cloud Storage in memory, behind gs:// URLs, without a network."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from etils.epath import backend
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry


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
    with pytest.MonkeyPatch.context() as patch:
        for scheme in Bucket.protocol:
            patch.setitem(_registry, scheme, Bucket)
        patch.setattr(Bucket, "store", {})
        reopened()
        yield Bucket.store
    reopened()
