"""Language models as drafters: the folder or file of a verifier, in the verifier's own dialect.

Steering is in two files beside the model's, which other programs ignore: steering_config.json and steering.safetensors.
"""

import json
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from treeflash_jax.core import files
from treeflash_jax.core.checks import read_json
from treeflash_jax.core.parameters import Entry
from treeflash_jax.drafters.language_model_drafter import LanguageModelDrafter
from treeflash_jax.drafters.steering import Steering
from treeflash_jax.formats import storage, tensor_files
from treeflash_jax.formats.architectures.dense import AS_ON_DISK
from treeflash_jax.formats.dialects.dialect import Dialect
from treeflash_jax.formats.keys import Keys
from treeflash_jax.formats.storage import Tensor
from treeflash_jax.models.config import ModelConfig

CONFIG, WEIGHTS = "steering_config.json", "steering.safetensors"
PUBLISHED = {"mix": "guidance_embd_layer.orig", "norm": "latent_mod_prep.norm", "project": "latent_mod_prep.w_guide"}
OURS = {name: f"steering.{name}" for name in PUBLISHED}


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
        layers = self.inner.read_config(path, keys)
        return LanguageModelDrafter(layers=layers, steering=read_steering(path / CONFIG, layers))

    @contextmanager
    def opened(self, path: Path, config: LanguageModelDrafter) -> Iterator[dict[str, Tensor]]:
        steers = tensor_files.open_folder(path, WEIGHTS) if config.steering else nullcontext({})
        with self.inner.opened(path, config.layers) as tensors, steers as more:
            yield {**tensors, **more}

    def entries(self, config: LanguageModelDrafter, specs: Any, names: Collection[str]) -> Any:
        entries = self.inner.entries(config.layers, specs, names)
        return entries | ({"steering": steering_entries(config, names)} if config.steering else {})

    def save(self, folder: Path, config: LanguageModelDrafter, specs: Any, params: Any, dtype: Any) -> None:
        """Writes steering to files of its own, so that other programs can read the model."""
        model_specs, model = ({name: x for name, x in tree.items() if name != "steering"} for tree in (specs, params))
        super().save(folder, replace(config, steering=None), model_specs, model, dtype)
        if config.steering:
            entries = steering_entries(config, ())
            storage.save(folder / WEIGHTS, specs["steering"], entries, params["steering"], dtype)
            raw = asdict(config.steering) | model_sizes(config.layers)
            files.write(folder / CONFIG, json.dumps(raw, indent=2) + "\n")

    def to_hf(self, config: LanguageModelDrafter) -> dict[str, Any]:
        return self.inner.to_hf(config.layers)


def model_sizes(layers: ModelConfig) -> dict[str, int]:
    """Returns the sizes of the small model that a steering_config.json states."""
    return {"num_layers": layers.num_layers, "ffn": layers.intermediate_size}


def read_steering(path: Path, layers: ModelConfig) -> Steering | None:
    """Returns what a steering_config.json states; None if there is no such file.

    Raises ValueError for a damaged file, a value that is not implemented, or steering of another small model.
    """
    if not os.path.lexists(path):
        return None
    keys, sizes = Keys(read_json(path), str(path)), model_sizes(layers)
    keys.check_known({"taps", "width", "rank", *sizes})
    keys.check_only({"rank": (0,)})  # earlier versions also wrote projections of two factors
    for name, size in sizes.items():
        got = keys.whole(name)
        keys.expect(got == size, name, got, f"{size}: it was trained for another model than the one beside it")
    taps = keys.value(list[int], "taps", None, "three layers of the verifier", least=0)
    keys.expect(len(taps) == 3, "taps", taps, "three layers of the verifier")
    return Steering(taps=tuple(taps), width=keys.whole("width"))


def steering_entries(config: LanguageModelDrafter, names: Collection[str]) -> dict[str, Any]:
    """Returns the location of each weight of steering, by our names of tensors or by the published ones."""
    prefixes, count = PUBLISHED if f"{PUBLISHED['mix']}.weight" in names else OURS, config.layers.num_layers
    return {
        "mix": Entry(f"{prefixes['mix']}.weight", **AS_ON_DISK),
        "mix_bias": Entry(f"{prefixes['mix']}.bias"),
        "norm": Entry(f"{prefixes['norm']}.weight"),
        "norm_bias": Entry(f"{prefixes['norm']}.bias"),
        "project": [
            Entry(f"{prefixes['project']}.weight", **AS_ON_DISK, part=(layer, count), part_axis=0) for layer in range(count)
        ],
    }
