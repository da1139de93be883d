"""Language models as drafters: the folder or file of a verifier, in the verifier's own dialect.

Steering is in steering.safetensors and steering_config.json, beside the model's files or in a folder without them.
"""

import json
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from treeflash_jax.core import files
from treeflash_jax.core.checks import LONGEST_PATH, clipped, read_json
from treeflash_jax.core.parameters import Entry
from treeflash_jax.drafters import steering
from treeflash_jax.drafters.language_model_drafter import LanguageModelConfig
from treeflash_jax.drafters.steering import SteeringConfig
from treeflash_jax.formats import storage, tensor_files
from treeflash_jax.formats.dialects.dialect import Dialect
from treeflash_jax.formats.keys import Keys
from treeflash_jax.formats.storage import Tensor

CONFIG, WEIGHTS = "steering_config.json", "steering.safetensors"
ENTRIES = {
    "mix": Entry("steering.mix.weight", (1, 0)),
    "mix_bias": Entry("steering.mix.bias"),
    "norm": Entry("steering.norm.weight"),
    "norm_bias": Entry("steering.norm.bias"),
    "project": Entry("steering.project.weight", (1, 2, 0), row_axes=2),
    "down": Entry("steering.down.weight", (1, 0)),
    "up": Entry("steering.up.weight", (1, 2, 0), row_axes=2),
}


class LanguageModel(Dialect):
    """A verifier's dialect, read and written as a drafter's. `dialects.recognise` wraps the dialect of the files."""

    name = "language_model"
    part = "drafter"
    kind = "language_model"

    def __init__(self, inner: Dialect):
        self.inner = inner

    def recognises(self, path: Path, keys: Keys) -> bool:
        return False  # `dialects.recognise` decides: the same folders are verifiers too

    def read_config(self, path: Path, keys: Keys) -> LanguageModelConfig:
        steers = read_steering_config(path) if os.path.lexists(path / CONFIG) else None
        return LanguageModelConfig(layers=self.inner.read_config(path, keys), steering=steers)

    @contextmanager
    def opened(self, path: Path, config: LanguageModelConfig) -> Iterator[dict[str, Tensor]]:
        steers = tensor_files.open_files(path, [WEIGHTS]) if config.steering else nullcontext({})
        with self.inner.opened(path, config.layers) as tensors, steers as more:
            yield {**tensors, **more}

    def entries(self, config: LanguageModelConfig, specs: Any, names: Collection[str]) -> Any:
        model = self.inner.entries(config.layers, _without_steering(specs), names)
        return model | ({"steering": _entries(config.steering)} if config.steering else {})

    def save(self, folder: Path, config: LanguageModelConfig, specs: Any, params: Any, dtype: Any) -> None:
        """Writes steering to separate files, so that other programs can read the model."""
        plain = replace(config, steering=None)
        super().save(folder, plain, _without_steering(specs), _without_steering(params), dtype)
        if config.steering is not None:
            save_steering(folder, config.steering, params["steering"], dtype)

    def to_hf(self, config: LanguageModelConfig) -> dict[str, Any]:
        return self.inner.to_hf(config.layers)


def _without_steering(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in tree.items() if name != "steering"}


def read_steering_config(folder: Path) -> SteeringConfig:
    """Reads the config of steering. Raises ValueError if there is none, or at a key or value that is not implemented."""
    path = folder / CONFIG
    if not os.path.lexists(path):
        place = clipped(folder, LONGEST_PATH)
        raise ValueError(f"{place}: got no {CONFIG}, expected a folder that train.language_model wrote with steers=true")
    keys = Keys(read_json(path), str(path))
    keys.check_known({"taps", "width", "num_layers", "ffn", "rank"})
    sizes = {name: keys.whole(name) for name in ("width", "num_layers", "ffn")}
    taps = keys.value(list[int], "taps", None, "three layers of the verifier", least=0)
    keys.expect(len(taps) == 3, "taps", taps, "three layers of the verifier")
    return SteeringConfig(taps=tuple(taps), rank=keys.whole("rank", 0, least=0), **sizes)


def _entries(config: SteeringConfig) -> dict[str, Entry]:
    return {name: ENTRIES[name] for name in steering.specs(config)}


def load_steering(folder: Path, dtype: Any, mesh: Any = None) -> dict[str, Any]:
    """Reads the weights of the steering of a small model. Raises ValueError for missing or damaged files."""
    config = read_steering_config(folder)
    with tensor_files.open_files(folder, [WEIGHTS]) as tensors:
        return storage.load(folder, tensors, steering.specs(config), _entries(config), dtype, mesh)


def save_steering(folder: Path, config: SteeringConfig, params: dict[str, Any], dtype: Any) -> None:
    """Writes both files of steering into a folder that exists."""
    storage.save(folder / WEIGHTS, steering.specs(config), _entries(config), params, dtype)
    files.write(folder / CONFIG, json.dumps(asdict(config), indent=2) + "\n")
