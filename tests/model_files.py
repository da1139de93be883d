"""Changes to files of models in place, and comparisons of what is read from them."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file, save_file


def assert_same(got: Any, expected: Any) -> None:
    """Two trees, such as a config and its weights, are equal bit for bit."""
    jax.tree.map(partial(np.testing.assert_array_equal, strict=True), got, expected)


def change_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder: Path, change: Callable[[dict], dict]) -> None:
    """Replaces the tensors in model.safetensors by what `change` makes of them."""
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")
