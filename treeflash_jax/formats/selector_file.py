"""selector.safetensors: the weights of a selector of delayed trees, and its config as metadata."""

import json
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from treeflash_jax.core.checks import clipped, fit, parse_json, whole
from treeflash_jax.core.parameters import Entry
from treeflash_jax.decoding import tree_selector
from treeflash_jax.decoding.tree_selector import SelectorConfig
from treeflash_jax.formats import safetensors, storage
from treeflash_jax.trees import Bucket

FILE, KEY = "selector.safetensors", "selector"


def load(path: Path, mesh: Any = None) -> tuple[SelectorConfig, dict[str, Any]]:
    """Returns config and float32 weights of a selector. Raises ValueError for a missing, damaged or other file."""
    metadata = safetensors.metadata(path)
    if KEY not in metadata:
        raise ValueError(f"{path}: got a file without a selector, expected what `python -m train.selector` wrote")
    try:
        raw = parse_json(metadata[KEY].encode())
        buckets = tuple(Bucket(*fit(list[int], bucket, "bucket")) for bucket in raw["buckets"])
        config = SelectorConfig(**raw | {"buckets": buckets, "width": whole(raw["width"], "width")})
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: got a damaged description ({clipped(error, 120)}); train it again") from None
    with safetensors.open_files(path.parent, [path.name]) as tensors:
        return config, storage.load(path, tensors, tree_selector.specs(config), _entries(config), jnp.float32, mesh)


def save(path: Path, config: SelectorConfig, params: dict[str, Any]) -> None:
    """Writes the file; equal selectors give equal files."""
    text = json.dumps(asdict(config) | {"buckets": [astuple(bucket) for bucket in config.buckets]}, sort_keys=True)
    storage.save(path, tree_selector.specs(config), _entries(config), params, jnp.float32, {KEY: text})


def _entries(config: SelectorConfig) -> dict[str, Entry]:
    return {name: Entry(name, tuple(range(len(spec.shape)))) for name, spec in tree_selector.specs(config).items()}
