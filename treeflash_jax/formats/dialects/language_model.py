"""Language models as drafters: the folder or file of a verifier, in the verifier's own dialect."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from treeflash_jax.drafters.language_model import LanguageModelConfig
from treeflash_jax.formats.dialects.dialect import Dialect
from treeflash_jax.formats.keys import Keys
from treeflash_jax.formats.storage import Tensor


class LanguageModel(Dialect):
    """A dialect of verifiers, read and written as that of a drafter: `dialects.of` makes it of what a folder is in."""

    name = "language-model"
    part = "drafter"

    def __init__(self, inner: Dialect):
        self.inner = inner

    def recognises(self, path: Path, keys: Keys) -> bool:
        return False  # folders of language models are verifiers' unless a drafter is asked for

    def read_config(self, path: Path, keys: Keys) -> LanguageModelConfig:
        return LanguageModelConfig(layers=self.inner.read_config(path, keys))

    def opened(self, path: Path, config: LanguageModelConfig) -> AbstractContextManager[Mapping[str, Tensor]]:
        return self.inner.opened(path, config.layers)

    def entries(self, config: LanguageModelConfig, specs: Any, names: Collection[str]) -> Any:
        return self.inner.entries(config.layers, specs, names)

    def spare(self, config: LanguageModelConfig, specs: Any) -> tuple[str, ...]:
        return self.inner.spare(config.layers, specs)

    def to_hf(self, config: LanguageModelConfig) -> dict[str, Any]:
        return self.inner.to_hf(config.layers)
