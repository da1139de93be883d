"""Trees of arrays in one .npz file, named by their path in the tree, written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def save(path: Path, tree: Any) -> None:
    """Writes every leaf; a kill in the middle leaves the file before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    temporary = path.with_suffix(".tmp.npz")
    np.savez(temporary, **{jax.tree_util.keystr(key): np.asarray(leaf) for key, leaf in leaves})
    os.replace(temporary, path)


def load(path: Path, like: Any) -> Any:
    """The saved tree, in the structure of `like` (arrays, or `ShapeDtypeStruct`).

    Raises:
      ValueError: missing, unknown or misshapen leaves.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(like)
    names = [jax.tree_util.keystr(key) for key, _ in leaves]
    with np.load(path) as file:
        if set(names) != set(file.files):
            raise ValueError(f"{path}: got arrays {sorted(set(names) ^ set(file.files))[:4]} on one side only")
        arrays = [file[name] for name in names]
    for name, array, (_, leaf) in zip(names, arrays, leaves, strict=True):
        if array.shape != leaf.shape:
            raise ValueError(f"{path}: {name} has shape {array.shape}, expected {leaf.shape}")
    typed = [jnp.asarray(array, leaf.dtype) for array, (_, leaf) in zip(arrays, leaves, strict=True)]
    return jax.tree.unflatten(treedef, typed)
