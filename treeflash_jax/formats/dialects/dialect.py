"""The protocol of file dialects."""

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from jax.typing import DTypeLike

from treeflash_jax.core import files
from treeflash_jax.core.parameters import Params
from treeflash_jax.formats import storage, tensor_files
from treeflash_jax.formats.keys import Keys
from treeflash_jax.formats.storage import Tensor
from treeflash_jax.trees.shape import MAX_NODES

OUR_KEY = "treeflash_config"  # holds fields of a drafter that only files written here state, if they are not the defaults
OUR_FIELDS = ("num_depths", "num_nodes", "drafter_temperature", "tau")


class Dialect(ABC):
    """A file format of verifiers or drafters: its marks, the meaning of its config, and the location of each weight.

    Tensors may be presented under other names, types or orders than the file's, as for GGUF files.

    Attributes:
      name: name in the registry, on the command line and in settings of export.
      part: content of its files.
      marks: keys of config.json that identify its folders.
      kind: kind of the drafters that it writes; None for verifiers.
    """

    name: ClassVar[str]
    part: ClassVar[Literal["verifier", "drafter"]]
    marks: ClassVar[tuple[str, ...]] = ()
    kind: ClassVar[str | None] = None

    def recognises(self, path: Path, keys: Keys) -> bool:
        """Returns whether these files are in this dialect; `keys` of files without a config.json are empty."""
        return all(mark in keys.raw for mark in self.marks)

    @abstractmethod
    def read_config(self, path: Path, keys: Keys) -> Any:
        """Returns the config. Raises ValueError for a key or value that is not implemented."""

    def copies(self, config: Any) -> dict[str, str]:
        """Returns the copies of the verifier's tensors: names in the verifier's specs, by their names in files."""
        return {}

    @contextmanager
    def opened(self, path: Path, config: Any) -> Iterator[dict[str, Tensor]]:
        """Opens the tensors that weights are read from, by the names of `entries`."""
        with tensor_files.open_folder(path) as tensors:
            yield self.select(path, config, tensors)

    def select(self, path: Path, config: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the tensors of `opened`, given all of a folder's. Raises ValueError for damaged ones."""
        return tensors

    @abstractmethod
    def entries(self, config: Any, specs: Any, names: Collection[str]) -> Any:
        """Returns the location on disk of each weight: a tree of Entry, in the structure of the specs.

        Args:
          names: names of the file's tensors, which determine the layout; empty when files are written.
        """

    def without_head(self, config: Any, params: Params) -> tuple[Any, Params]:
        """Returns a drafter without its head. Raises ValueError if drafters in this dialect have none."""
        raise ValueError(f"got a head to drop, expected none: drafters in {self.name} files have no head")

    def save(self, folder: Path, config: Any, specs: Any, params: Params, dtype: DTypeLike) -> None:
        """Writes config.json and model.safetensors into a folder, created if missing.

        Raises ValueError for a config that the dialect cannot store, or weights of other shapes than the specs'.
        """
        raw = self.to_hf(config) | {"dtype": jnp.dtype(dtype).name}  # raises before the folder is made
        folder.mkdir(parents=True, exist_ok=True)
        storage.save(folder / "model.safetensors", specs, self.entries(config, specs, ()), params, dtype)
        files.write(folder / "config.json", json.dumps(raw, indent=2) + "\n")

    def to_hf(self, config: Any) -> dict[str, Any]:
        """Returns config.json for a config, without dtype. Raises ValueError if the dialect cannot store it."""
        raise ValueError(f"{self.name} files cannot be written, expected another dialect")


def read_our_fields(keys: Keys, names: Collection[str]) -> dict[str, Any]:
    """Returns the named fields of a drafter that its config.json states: fields of OUR_FIELDS, or "thinking"."""
    keys = keys.table(OUR_KEY)
    keys.check_known(names)
    whole = partial(keys.whole, most=MAX_NODES)
    kinds = {"num_depths": whole, "num_nodes": whole, "thinking": keys.truth}
    return {name: kinds.get(name, keys.number)(name) for name in names if name in keys.raw}


def write_our_fields(config: Any, names: Collection[str]) -> dict[str, Any]:
    """Returns the key of config.json with the fields that differ from their defaults; {} if none does."""
    stated = {name: getattr(config, name) for name in names}
    stated = {name: value for name, value in stated.items() if value != getattr(type(config), name)}
    return {OUR_KEY: stated} if stated else {}
