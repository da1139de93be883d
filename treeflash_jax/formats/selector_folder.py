"""Folder of a selector of delayed trees: config.json, and its weights in model.safetensors."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from treeflash_jax.core import files
from treeflash_jax.core.checks import UnknownSetting, expect, read_json
from treeflash_jax.core.parameters import Entry
from treeflash_jax.core.settings import build
from treeflash_jax.formats import storage, tensor_files
from treeflash_jax.trees.sampled import selector
from treeflash_jax.trees.sampled.selector import SelectorConfig

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def read_config(folder: str | Path) -> SelectorConfig:
    """Reads the config of a selector. Raises ValueError for any other folder."""
    path = Path(folder, CONFIG)
    expect(os.path.exists(path), "selector", str(folder), "a folder that `python -m train.selector` wrote")
    try:
        return build(SelectorConfig, read_json(path), str(path))
    except UnknownSetting as error:
        raise ValueError(f"{error}; train the selector again") from None


def load(folder: str | Path, mesh: Any = None) -> dict[str, Any]:
    """Returns the float32 weights of a selector. Raises FileNotFoundError or ValueError for missing or damaged ones."""
    config = read_config(folder)
    with tensor_files.open_folder(Path(folder)) as tensors:
        return storage.load(Path(folder), tensors, selector.specs(config), _entries(config), jnp.float32, mesh)


def save(folder: Any, config: SelectorConfig, weights: dict[str, Any]) -> None:
    """Writes a selector to a folder that exists."""
    storage.save(folder / WEIGHTS, selector.specs(config), _entries(config), weights, jnp.float32)
    files.write(folder / CONFIG, json.dumps(asdict(config), indent=1) + "\n")


def _entries(config: SelectorConfig) -> dict[str, Entry]:
    return {name: Entry(name, tuple(range(len(spec.shape)))) for name, spec in selector.specs(config).items()}
