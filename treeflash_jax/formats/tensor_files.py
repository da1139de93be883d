"""Safetensors folders: a single file, or parts with an index."""

import json
import os
import re
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from treeflash_jax.core.error_text import LONGEST_PATH, LONGEST_VALUE, clipped, quoted
from treeflash_jax.core.json_files import read_json
from treeflash_jax.formats.storage import FLOAT8

FILE_NAME = re.compile(r"\w[\w.-]{0,254}", re.ASCII)


@contextmanager
def open_folder(folder: Path) -> Iterator[dict[str, Any]]:
    """Opens a folder's tensors by name, in model.safetensors or the parts of its index; finally closes the files.

    Raises ValueError for files that are missing or damaged or lack a tensor that the index lists, and for an index that
    names anything but files of this folder.
    """
    listed = _listed(folder)
    with ExitStack() as stack:
        handles = {name: _open(folder / name, stack) for name in file_names(folder)}
        held = {name: {*handle.keys()} for name, handle in handles.items()}
        for tensor, name in listed.items():
            if tensor not in held[name]:
                shown = clipped(tensor, LONGEST_VALUE)
                raise ValueError(f"{folder / name}: no tensor {shown}, which the index says it holds")
        listed = listed or {tensor: name for name in held for tensor in held[name]}
        tensors = {tensor: handles[name].get_slice(tensor) for tensor, name in listed.items()}
        mapped = {name for tensor, name in listed.items() if tensors[tensor].get_dtype() == FLOAT8}
        for name in sorted(mapped):
            tensors |= {tensor: x for tensor, x in _map_float8(folder / name).items() if listed.get(tensor) == name}
        yield tensors


@dataclass(frozen=True)
class Float8Tensor:
    """A float8_e4m3fn tensor of a safetensors file, mapped into memory, because the library has no NumPy type for it."""

    path: Path
    shape: tuple[int, ...]
    offset: int

    def get_shape(self) -> tuple[int, ...]:
        return self.shape

    def get_dtype(self) -> str:
        return FLOAT8

    def __getitem__(self, index: Any) -> np.ndarray:
        return np.memmap(self.path, jnp.float8_e4m3fn, "r", self.offset, self.shape)[index]


def _map_float8(path: Path) -> dict[str, Float8Tensor]:
    """Returns the float8 tensors of a file. The library must have checked the file."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    return {
        name: Float8Tensor(path, tuple(tensor["shape"]), 8 + size + tensor["data_offsets"][0])
        for name, tensor in header.items()
        if tensor.get("dtype") == FLOAT8
    }


def file_names(folder: Path) -> list[str]:
    """Returns the names of files that `open_folder` reads; some may be missing. Raises ValueError for a bad index."""
    return sorted({*_listed(folder).values()}) or ["model.safetensors"]


def names(folder: Path) -> Collection[str]:
    """Returns the names of a folder's tensors; () if its files are missing or damaged, which `open_folder` reports."""
    try:
        if listed := _listed(folder):
            return listed.keys()
        with open_folder(folder) as tensors:
            return tensors.keys()
    except (FileNotFoundError, ValueError):
        return ()


def _listed(folder: Path) -> dict[str, str]:
    """Returns the file of every tensor in the folder's index; {} without an index, or if there is a whole file."""
    index = folder / "model.safetensors.index.json"
    if not index.exists() or (folder / "model.safetensors").exists():
        return {}
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ValueError(f"{index}: got no weight_map, expected a map of tensor names to files")
    for tensor, name in listed.items():
        if not isinstance(name, str) or not FILE_NAME.fullmatch(name):
            got = f"{quoted(name)} for tensor {clipped(tensor, LONGEST_VALUE)}"
            raise ValueError(f"{index}: got {got}, expected the name of a file in this folder")
    return listed


def _open(path: Path, stack: ExitStack) -> Any:
    if not os.path.exists(path):  # also False for names that no file can have
        raise FileNotFoundError(f"{clipped(path, LONGEST_PATH)} not found; expected a safetensors file there")
    try:
        return stack.enter_context(safe_open(path, framework="np"))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or is no safetensors file ({error}); download it again") from None
