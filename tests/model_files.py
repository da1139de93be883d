"""Changes to files of models in place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from safetensors.numpy import load_file, save_file


def change_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder: Path, change: Callable[[dict], dict]) -> None:
    """Replaces the tensors in model.safetensors by what `change` makes of them."""
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")
