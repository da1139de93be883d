"""The protocol of file dialects."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax.numpy as jnp

from treeflash_jax import files
from treeflash_jax.formats import safetensors, storage
from treeflash_jax.formats.keys import Keys
from treeflash_jax.formats.storage import Tensor


class Dialect:
    """One form in which verifiers or drafters lie in folders and files.

    A dialect says which files are its own, what their config means, and where each weight lies in their tensors; `folders`
    reads and writes by that. Tensors may be presented under other names, types or row orders than the file's, as those of
    GGUF files are.

    Attributes:
      name: in the registry, on the command line and in settings of export.
      part: what its files hold.
      marks: keys of config.json that its folders are known by.
      kind: of the drafters that it writes; None: of verifiers, or not checked.
    """

    name: ClassVar[str]
    part: ClassVar[Literal["verifier", "drafter"]]
    marks: ClassVar[tuple[str, ...]] = ()
    kind: ClassVar[str | None] = None

    def recognises(self, path: Path, keys: Keys) -> bool:
        """Whether these files are in this dialect.

        Args:
          keys: of the folder's config.json; none for other files.
        """
        return all(mark in keys.raw for mark in self.marks)

    def read_config(self, path: Path, keys: Keys) -> Any:
        """The config. Raises ValueError at a key or value that is not implemented."""
        raise NotImplementedError

    def opened(self, path: Path, config: Any) -> AbstractContextManager[Mapping[str, Tensor]]:
        """The tensors by name, while they can be read."""
        return safetensors.open_folder(path)

    def entries(self, config: Any, specs: Any, names: Collection[str]) -> Any:
        """Where each weight lies: a tree of Entry.

        Args:
          names: of the tensors in the files, where a dialect has several layouts; empty where files are to be written.

        Raises:
          ValueError: names of several layouts, or of none.
        """
        raise NotImplementedError

    def stop_ids(self, path: Path, config: Any) -> tuple[int, ...]:
        """Ids that end an answer, of a verifier. Raises ValueError where they cannot be read."""
        raise NotImplementedError

    def spare(self, config: Any, specs: Any) -> tuple[str, ...]:
        """Names of tensors that files may hold though no weight wants them."""
        return ()

    def save(self, folder: Path, config: Any, specs: Any, params: Any, dtype: Any) -> None:
        """Writes config.json and model.safetensors into a folder that exists.

        Raises:
          ValueError: sizes that the dialect cannot hold, or weights that are not of the specs.
        """
        raw = self.to_hf(config) | {"dtype": jnp.dtype(dtype).name}
        storage.save(folder / "model.safetensors", specs, self.entries(config, specs, ()), params, dtype)
        files.write(folder / "config.json", json.dumps(raw, indent=2) + "\n")

    def to_hf(self, config: Any) -> dict[str, Any]:
        """config.json of these sizes, dtype left out. Raises ValueError where the dialect cannot hold them."""
        raise ValueError(f"{self.name} files cannot be written, expected another dialect")
