"""Language models as drafters: the folder or file of a verifier, in the verifier's own dialect."""

from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from treeflash_jax.drafters.language_model_drafter import LanguageModelDrafter
from treeflash_jax.formats.dialects.dialect import Dialect
from treeflash_jax.formats.keys import Keys
from treeflash_jax.formats.storage import Tensor


class LanguageModel(Dialect):
    """A verifier's dialect, read and written as a drafter's. `dialects.recognise` wraps the dialect of the files."""

    name = "language_model"
    part = "drafter"
    kind = "language_model"

    def __init__(self, inner: Dialect):
        self.inner = inner

    def recognises(self, path: Path, keys: Keys) -> bool:
        return False  # `dialects.recognise` decides: the same folders are verifiers too

    def read_config(self, path: Path, keys: Keys) -> LanguageModelDrafter:
        return LanguageModelDrafter(layers=self.inner.read_config(path, keys))

    def opened(self, path: Path, config: LanguageModelDrafter) -> AbstractContextManager[dict[str, Tensor]]:
        return self.inner.opened(path, config.layers)

    def entries(self, config: LanguageModelDrafter, specs: Any, names: Collection[str]) -> Any:
        return self.inner.entries(config.layers, specs, names)

    def to_hf(self, config: LanguageModelDrafter) -> dict[str, Any]:
        return self.inner.to_hf(config.layers)
