"""Steering in files: steering.safetensors and steering_config.json, beside the small model's files or on their own."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from treeflash_jax.core import files
from treeflash_jax.core.checks import LONGEST_PATH, clipped, read_json
from treeflash_jax.core.parameters import Entry
from treeflash_jax.drafters import steering
from treeflash_jax.drafters.steering import SteeringConfig
from treeflash_jax.formats import safetensors, storage
from treeflash_jax.formats.keys import Keys

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


def has(folder: Path) -> bool:
    """Returns true if a folder holds steering."""
    return os.path.lexists(folder / CONFIG)


def read_config(folder: Path) -> SteeringConfig:
    """Reads the config. Raises ValueError if there is none, or at a key or value that is not implemented."""
    path = folder / CONFIG
    if not has(folder):
        place = clipped(folder, LONGEST_PATH)
        raise ValueError(f"{place}: got no {CONFIG}, expected a folder that train.language_model wrote with steers=true")
    keys = Keys(read_json(path), str(path))
    keys.check_known({"taps", "width", "num_layers", "ffn", "rank"})
    sizes = {name: keys.whole(name) for name in ("width", "num_layers", "ffn")}
    taps = keys.value(list[int], "taps", None, "three layers of the verifier", least=0)
    if len(taps) != 3:
        raise ValueError(f"{path}: got {len(taps)} taps, expected three layers of the verifier")
    return SteeringConfig(taps=tuple(taps), rank=keys.whole("rank", 0, least=0), **sizes)


def entries(config: SteeringConfig) -> dict[str, Entry]:
    return {name: ENTRIES[name] for name in steering.specs(config)}


def load(folder: Path, dtype: Any, mesh: Any = None) -> tuple[SteeringConfig, dict[str, Any]]:
    """Reads config and weights of the steering of a small model. Raises ValueError for missing or damaged files."""
    config = read_config(folder)
    with safetensors.open_files(folder, [WEIGHTS]) as tensors:
        return config, storage.load(folder, tensors, steering.specs(config), entries(config), dtype, mesh)


def save(folder: Path, config: SteeringConfig, params: dict[str, Any], dtype: Any) -> None:
    """Writes both files into a folder that exists."""
    storage.save(folder / WEIGHTS, steering.specs(config), entries(config), params, dtype)
    files.write(folder / CONFIG, json.dumps(asdict(config), indent=2) + "\n")
