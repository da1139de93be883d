"""selector.safetensors: the weights of a selector of delayed trees, and in its metadata what it chooses between."""

from __future__ import annotations

import hashlib
import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from treeflash_jax.adaptive import selector
from treeflash_jax.adaptive.selector import SelectorConfig
from treeflash_jax.checks import clipped, fit, parse_json, whole
from treeflash_jax.formats import safetensors, storage
from treeflash_jax.params import Entry
from treeflash_jax.trees import Bucket

FILE, ABOUT, DIGEST = "selector.safetensors", "selector", "selector_sha256"


def load(path: Path, mesh: Any = None) -> tuple[SelectorConfig, dict[str, Any]]:
    """A selector: what it chooses between, and its weights in float32.

    Raises:
      ValueError: a file that is missing, damaged or no selector's, or one of another bucket list than it was written with.
    """
    held = safetensors.metadata(path)
    if ABOUT not in held:
        raise ValueError(f"{path}: got a file without a selector, expected what `python -m train.selector` wrote")
    if held.get(DIGEST) != _digest(held[ABOUT]):
        raise ValueError(f"{path}: got buckets, pair or rule that are not those it was written with; train it again")
    try:
        raw = parse_json(held[ABOUT].encode())
        buckets = tuple(Bucket(*fit(list[int], bucket, "bucket")) for bucket in raw["buckets"])
        config = SelectorConfig(**raw | {"buckets": buckets, "width": whole(raw["width"], "width")})
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: got a damaged description ({clipped(error, 120)}); train it again") from None
    with safetensors.open_files(path.parent, [path.name]) as tensors:
        return config, storage.load(path, tensors, selector.specs(config), _entries(config), jnp.float32, mesh)


def save(path: Path, config: SelectorConfig, params: dict[str, Any]) -> None:
    """Writes the file; equal selectors give equal files."""
    described = vars(config) | {"buckets": [astuple(bucket) for bucket in config.buckets]}
    text = json.dumps(described, sort_keys=True)
    about = {ABOUT: text, DIGEST: _digest(text)}
    storage.save(path, selector.specs(config), _entries(config), params, jnp.float32, about)


def _entries(config: SelectorConfig) -> dict[str, Entry]:
    return {name: Entry(name, tuple(range(len(spec.shape)))) for name, spec in selector.specs(config).items()}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
