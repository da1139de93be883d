"""Safetensors folders: one file, or parts with an index."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from treeflash_jax.checks import read_json


@contextmanager
def open_folder(folder: Path) -> Iterator[dict[str, Any]]:
    """The tensors of a folder by name, over model.safetensors or the parts of its index; the files close at the end.

    Raises:
      ValueError: files that are missing or damaged, or that lack a tensor which the index lists.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        listed = read_json(index).get("weight_map")
        if not isinstance(listed, dict):
            raise ValueError(f"{index}: got no weight_map, expected a map of tensor names to files")
        files = sorted(set(listed.values()))
    else:
        listed, files = {}, ["model.safetensors"]
    with ExitStack() as stack:
        held = {name: _open(folder / name, stack) for name in files}
        file_of = {tensor: name for name, handle in held.items() for tensor in handle.keys()}
        for tensor, name in listed.items():
            if file_of.get(tensor) != name:
                raise ValueError(f"{folder / name}: no tensor {tensor}, which {index.name} says it holds")
        yield {tensor: held[name].get_slice(tensor) for tensor, name in file_of.items()}


def _open(path: Path, stack: ExitStack) -> Any:
    if not path.exists():
        raise ValueError(f"{path} not found; expected a folder with all its safetensors files")
    try:
        return stack.enter_context(safe_open(path, framework="np"))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or is no safetensors file ({error}); download it again") from None
