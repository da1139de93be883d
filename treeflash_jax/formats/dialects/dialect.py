"""`Dialect`, the protocol of a file format: how to recognise it, what its config means, and where each weight is."""

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
from treeflash_jax.trees.tree_inputs import MAX_NODES

OUR_KEY = "treeflash_config"  # key of config.json for fields that only this package writes
OUR_FIELDS = ("num_depths", "num_nodes", "drafter_temperature", "tau")
_FIELDS = {"candidate_tokens": "num_nodes"}  # fields by other names, which files of block drafters have


class Dialect(ABC):
    """A file format of verifiers or drafters: how to recognise it, what its config means, and where each weight is.

    It may present tensors under other names, types or orders than the file's, as for GGUF files.

    Attributes:
      name: name in the registry, on the command line and in export settings.
      part: "verifier" or "drafter".
      marks: keys of config.json that identify its folders.
      kind: kind of the drafters that it writes; None for verifiers.
    """

    name: ClassVar[str]
    part: ClassVar[Literal["verifier", "drafter"]]
    marks: ClassVar[tuple[str, ...]] = ()
    kind: ClassVar[str | None] = None

    def recognises(self, path: Path, keys: Keys) -> bool:
        """Returns whether these files are in this dialect. Without a config.json, `keys` are empty."""
        return all(mark in keys.raw for mark in self.marks)

    @abstractmethod
    def read_config(self, path: Path, keys: Keys) -> Any:
        """Returns the config. Raises ValueError for a key or value that is not implemented."""

    def copies(self, config: Any) -> dict[str, str]:
        """Returns the copies of verifier tensors in these files: by name in the files, the name in the verifier's specs."""
        return {}

    @contextmanager
    def opened(self, path: Path, config: Any) -> Iterator[dict[str, Tensor]]:
        """Opens the tensors from which weights are read, under the names in `entries`."""
        with tensor_files.open_folder(path) as tensors:
            yield self.select(path, config, tensors)

    def select(self, path: Path, config: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the tensors of `opened` from all tensors of a folder. Raises ValueError for damaged tensors."""
        return tensors

    @abstractmethod
    def entries(self, config: Any, specs: Any, names: Collection[str]) -> Any:
        """Returns the location on disk of each weight: a tree of Entry with the structure of the specs.

        Args:
          names: names of the file's tensors, which determine the layout; empty if files are being written.
        """

    def without_head(self, config: Any, params: Params) -> tuple[Any, Params]:
        """Returns a drafter without its head. Raises ValueError if drafters of this dialect have no heads."""
        raise ValueError(f"got a head to drop, expected none: drafters in {self.name} files have no head")

    def save(self, folder: Path, config: Any, specs: Any, params: Params, dtype: DTypeLike) -> None:
        """Writes config.json and model.safetensors into a folder, which is created if missing.

        Raises ValueError if the dialect cannot store the config, or if weights have other shapes than the specs.
        """
        raw = self.to_hf(config) | {"dtype": jnp.dtype(dtype).name}  # raises its errors before the folder is created
        folder.mkdir(parents=True, exist_ok=True)
        storage.save(folder / "model.safetensors", specs, self.entries(config, specs, ()), params, dtype)
        files.write(folder / "config.json", json.dumps(raw, indent=2) + "\n")

    def to_hf(self, config: Any) -> dict[str, Any]:
        """Returns config.json for a config, without its dtype. Raises ValueError if the dialect cannot store it."""
        raise ValueError(f"{self.name} files cannot be written, expected another dialect")


def read_our_fields(keys: Keys, names: Collection[str], others: Collection[str] = ()) -> dict[str, Any]:
    """Returns the fields of a drafter that its config.json states under these names. `others` are read elsewhere."""
    keys = keys.table(OUR_KEY)
    keys.check_known({*names, *others})
    integer = partial(keys.integer, most=MAX_NODES)
    kinds = dict.fromkeys(("num_depths", "num_nodes", "candidate_tokens"), integer)
    kinds |= {"candidates": keys.integer, "head_rank": keys.integer, "thinking": keys.truth}
    return {_FIELDS.get(name, name): kinds.get(name, keys.number)(name) for name in names if name in keys.raw}


def write_our_fields(config: Any, names: Collection[str], **usual: Any) -> dict[str, Any]:
    """Returns a key of config.json with the fields that differ from what a reader takes without it; {} if there are none.

    Args:
      usual: values that a reader takes, if they are not the defaults of the fields.
    """
    fields = {name: _FIELDS.get(name, name) for name in names}
    usual = {field: getattr(type(config), field) for field in fields.values()} | usual
    stated = {name: getattr(config, field) for name, field in fields.items() if getattr(config, field) != usual[field]}
    return {OUR_KEY: stated} if stated else {}
