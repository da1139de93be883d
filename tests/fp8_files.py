"""Folders of FP8 files made from dense ones, and the dense weights that they stand for."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from treeflash_jax.models.quantized_weight import Quantized

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
FLOAT = {"quant_method": "compressed-tensors", "format": "float-quantized"}


def split(tensor: np.ndarray, block: Sequence[int], rng: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns values, scales and their product, for blocks of these outputs and inputs; the scales are not the largest."""
    counts = [-(-size // part) for size, part in zip(tensor.shape[-2:], block, strict=True)]
    scales = rng.uniform(0.001, 0.004, (*tensor.shape[:-2], *counts)).astype(jnp.bfloat16).astype(np.float32)
    rows, columns = (np.arange(size) // part for size, part in zip(tensor.shape[-2:], block, strict=True))
    repeated = scales[..., rows, :][..., columns]
    values = np.clip(tensor / repeated, -448, 448).astype(jnp.float8_e4m3fn)
    return values, scales, values.astype(np.float32) * repeated


def make_folders(
    tmp_path: Path,
    source: Path,
    block: Sequence[int],
    config: dict,
    *,
    ending: str = "_scale_inv",
    scale_dtype: Any = None,
    kept: Sequence[str] = (),
    extra: dict | None = None,
) -> tuple[Path, Path]:
    """Returns an FP8 folder and a dense one; "proj" of names without `kept` are FP8."""
    tensors, rng = load_file(source / "model.safetensors"), np.random.default_rng(0)
    small, dense = dict(tensors) | (extra or {}), dict(tensors)
    for name, tensor in tensors.items():
        if "proj" in name and tensor.ndim >= 2 and not any(part in name for part in kept):
            sizes = [size or whole for size, whole in zip(block, tensor.shape[-2:], strict=True)]
            small[name], scales, dense[name] = split(tensor, sizes, rng)
            small[f"{name}{ending}"] = scales.astype(scale_dtype or np.float32)
    folders = tmp_path / "fp8", tmp_path / "dense"
    for folder, held in zip(folders, (small, dense), strict=True):
        folder.mkdir()
        save_file(held, folder / "model.safetensors")
        for file in source.glob("*.json"):
            shutil.copy(file, folder)
    raw = json.loads((source / "config.json").read_text())
    (folders[0] / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    return folders


def read_float8(folder: Path) -> dict[str, np.ndarray]:
    """Returns the FP8 tensors of a folder, for which the library has no NumPy type."""
    data = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = {name: x for name, x in json.loads(data[8 : 8 + size]).items() if x.get("dtype") == "F8_E4M3"}
    spans = {name: slice(*(8 + size + offset for offset in x["data_offsets"])) for name, x in header.items()}
    return {name: np.frombuffer(data[spans[name]], jnp.float8_e4m3fn).reshape(x["shape"]) for name, x in header.items()}


def widened(weight: Any, spec: Any) -> np.ndarray:
    """Returns values times scales, in float32 at least."""
    if not isinstance(weight, Quantized):
        return np.asarray(weight)
    scale = np.asarray(weight.scale, np.promote_types(np.float32, np.asarray(weight.scale).dtype))
    if weight.block is None:
        return np.asarray(weight.values).astype(scale.dtype) * np.expand_dims(scale, spec.inputs)
    scale = scale.astype(np.promote_types(np.float32, scale.dtype))  # of powers of two
    for axis, part in enumerate(weight.block):
        scale = scale.repeat(part, axis)
    return np.asarray(weight.values).astype(scale.dtype) * scale


def count_values(weights: Any) -> int:
    """Returns the number of weights that are kept in FP8."""
    return sum(x.dtype == jnp.float8_e4m3fn for x in jax.tree.leaves(weights))
