"""Safetensors folders: one file, or parts with an index."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePath
from typing import Any

from safetensors import SafetensorError, safe_open

from treeflash_jax.core.checks import LONGEST_PATH, QUOTED, clipped, quoted, read_json


@contextmanager
def open_folder(folder: Path) -> Iterator[dict[str, Any]]:
    """Opens the tensors of a folder by name, from model.safetensors or the parts of its index; the files close at the end.

    Raises:
      ValueError: files that are missing or damaged, or an index that names anything but files of this folder.
    """
    index = folder / "model.safetensors.index.json"
    names = sorted(set(_listed(index).values())) if index.exists() else ["model.safetensors"]
    with open_files(folder, names) as tensors:
        yield tensors


@contextmanager
def open_files(folder: Path, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Opens the tensors of some files of a folder as `open_folder`."""
    with ExitStack() as stack:
        files = [stack.enter_context(_open(folder / name)) for name in names]
        yield {tensor: file.get_slice(tensor) for file in files for tensor in file.keys()}


def names(folder: Path) -> Collection[str]:
    """Returns the names of a folder's tensors; none if its files are missing or damaged, which `open_folder` reports."""
    index = folder / "model.safetensors.index.json"
    try:
        if index.exists():
            return _listed(index)
        with open_folder(folder) as tensors:
            return tensors
    except ValueError:
        return ()


def metadata(path: Path) -> dict[str, str]:
    """Returns the metadata of a file. Raises ValueError if it is missing or damaged."""
    return _open(path).metadata() or {}


def _listed(index: Path) -> dict[str, str]:
    """Returns the file of every tensor, by the index."""
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ValueError(f"{index}: got no weight_map, expected a map of tensor names to files")
    for tensor, name in listed.items():
        if not isinstance(name, str) or PurePath(name).name != name:
            got = f"{quoted(name)} for tensor {clipped(tensor, QUOTED)}"
            raise ValueError(f"{index}: got {got}, expected the name of a file in this folder")
    return listed


def _open(path: Path) -> Any:
    if not os.path.exists(path):  # False for names that no file can have, too
        raise ValueError(f"{clipped(path, LONGEST_PATH)} not found; expected a safetensors file there")
    try:
        return safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or is no safetensors file ({error}); download it again") from None
