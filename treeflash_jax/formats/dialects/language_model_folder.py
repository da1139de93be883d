"""Language models as drafters: the folder or file of a verifier, in the verifier's own dialect."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from treeflash_jax.drafters.causal_lm import LanguageModelConfig
from treeflash_jax.formats import safetensors, steering_files
from treeflash_jax.formats.dialects.dialect import Dialect
from treeflash_jax.formats.keys import Keys
from treeflash_jax.formats.storage import Tensor


class LanguageModel(Dialect):
    """A verifier's dialect, read and written as a drafter's. `dialects.recognise` wraps the dialect of the files."""

    name = "language-model"
    part = "drafter"
    kind = "language model"

    def __init__(self, inner: Dialect):
        self.inner = inner

    def recognises(self, path: Path, keys: Keys) -> bool:
        return False  # `dialects.recognise` decides: the same folders are verifiers too

    def read_config(self, path: Path, keys: Keys) -> LanguageModelConfig:
        steering = steering_files.read_config(path) if steering_files.has(path) else None
        return LanguageModelConfig(layers=self.inner.read_config(path, keys), steering=steering)

    @contextmanager
    def opened(self, path: Path, config: LanguageModelConfig) -> Iterator[Mapping[str, Tensor]]:
        with ExitStack() as stack:
            tensors = dict(stack.enter_context(self.inner.opened(path, config.layers)))
            if config.steering:
                tensors |= stack.enter_context(safetensors.open_files(path, [steering_files.WEIGHTS]))
            yield tensors

    def entries(self, config: LanguageModelConfig, specs: Any, names: Collection[str]) -> Any:
        model_names = [name for name in names if not name.startswith("steering.")]
        model = self.inner.entries(config.layers, _without_steering(specs), model_names)
        return model | ({"steering": steering_files.entries(config.steering)} if config.steering else {})

    def spare(self, config: LanguageModelConfig, specs: Any) -> tuple[str, ...]:
        return self.inner.spare(config.layers, _without_steering(specs))

    def save(self, folder: Path, config: LanguageModelConfig, specs: Any, params: Any, dtype: Any) -> None:
        """Writes steering to separate files, so that other programs can read the model."""
        plain = replace(config, steering=None)
        super().save(folder, plain, _without_steering(specs), _without_steering(params), dtype)
        if config.steering is not None:
            steering_files.save(folder, config.steering, params["steering"], dtype)

    def to_hf(self, config: LanguageModelConfig) -> dict[str, Any]:
        return self.inner.to_hf(config.layers)


def _without_steering(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in tree.items() if name != "steering"}
