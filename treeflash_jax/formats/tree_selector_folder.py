"""Folder of a tree selector: config.json, and model.safetensors with float32 weights."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import jax.numpy as jnp
from jax.sharding import Mesh

from treeflash_jax.core import files
from treeflash_jax.core.checks import expect
from treeflash_jax.core.json_files import read_json
from treeflash_jax.core.parameters import Entry, Params
from treeflash_jax.core.setting_tables import build
from treeflash_jax.formats import storage, tensor_files
from treeflash_jax.trees.sampled import tree_selector
from treeflash_jax.trees.sampled.tree_selector import TreeSelectorConfig


def read_config(folder: str | Path) -> TreeSelectorConfig:
    """Reads the config of a selector. Raises ValueError or UnknownSetting if the folder is not a selector's."""
    path = Path(folder, "config.json")
    expect(os.path.exists(path), "selector", str(folder), "a folder that `python -m train.selector` wrote")
    return build(TreeSelectorConfig, read_json(path), str(path))


def load(folder: str | Path, mesh: Mesh | None = None) -> Params:
    """Returns the weights of a selector. Raises FileNotFoundError or ValueError if they are missing or damaged."""
    config = read_config(folder)
    with tensor_files.open_folder(Path(folder)) as tensors:
        return storage.load(Path(folder), tensors, tree_selector.specs(config), _entries(config), jnp.float32, mesh)


def save(folder: Path, config: TreeSelectorConfig, weights: Params) -> None:
    storage.save(folder / "model.safetensors", tree_selector.specs(config), _entries(config), weights, jnp.float32)
    files.write(folder / "config.json", json.dumps(asdict(config)) + "\n")


def _entries(config: TreeSelectorConfig) -> dict[str, Entry]:
    return {name: Entry(name, tuple(range(len(spec.shape)))) for name, spec in tree_selector.specs(config).items()}
