"""Folders of files quantised to groups, each weight made of random codes, and the dense weights that they stand for."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from treeflash_jax.formats import tensor_files
from treeflash_jax.models.backend import block_scales
from treeflash_jax.models.quantized_weight import is_quantized

GROUP = 16
PACK = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head", "re:.*router.*"]}
PACK |= {
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group"}}}
}
NVFP4 = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head"]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.router"]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "modules_to_not_convert": ["router"]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False, "lm_head": False}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def pack(numbers: np.ndarray, axis: int = -1, bits: int = 4) -> np.ndarray:
    """Returns words of 32 bits along an axis, the first number lowest; the last word is filled with zeros."""
    numbers, each = np.moveaxis(numbers, axis, -1).astype(np.uint32), 32 // bits
    numbers = np.pad(numbers, [(0, 0)] * (numbers.ndim - 1) + [(0, -numbers.shape[-1] % each)])
    shifted = numbers.reshape(*numbers.shape[:-1], -1, each) << np.arange(0, 32, bits, dtype=np.uint32)
    return np.ascontiguousarray(np.moveaxis(shifted.sum(-1, dtype=np.uint32).view(np.int32), -1, axis))


def numbers(rng: Any, outputs: int, inputs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns codes, zero points and scales of groups of inputs."""
    groups = outputs, inputs // GROUP
    scales = rng.uniform(0.001, 0.004, groups).astype(np.float16)
    return rng.integers(0, 16, (outputs, inputs)), rng.integers(1, 16, groups), scales


def expand(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, groups: np.ndarray) -> np.ndarray:
    return ((codes - zeros[:, groups]) * scales.astype(np.float32)[:, groups]).astype(np.float32)


def compressed(rng: Any, outputs: int, inputs: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    codes, zeros, scales = numbers(rng, outputs, inputs)
    groups = rng.permutation(np.arange(inputs) // GROUP)
    parts = {
        "weight_packed": pack(codes), "weight_zero_point": pack(zeros, 0), "weight_scale": scales,
        "weight_shape": np.array([outputs, inputs]), "weight_g_idx": groups.astype(np.int32),
    }  # fmt: skip
    return parts, expand(codes, zeros, scales, groups)


def awq(rng: Any, outputs: int, inputs: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    codes, zeros, scales = numbers(rng, outputs, inputs)
    order = np.arange(outputs).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].ravel()
    parts = {"qweight": pack(codes.T[:, order]), "qzeros": pack(zeros.T[:, order]), "scales": scales.T.copy()}
    return parts, expand(codes, zeros, scales, np.arange(inputs) // GROUP)


def gptq(rng: Any, outputs: int, inputs: int, first: int = 1) -> tuple[dict[str, np.ndarray], np.ndarray]:
    codes, zeros, scales = numbers(rng, outputs, inputs)
    groups = rng.permutation(np.arange(inputs) // GROUP)
    parts = {"qweight": pack(codes.T, 0), "qzeros": pack(zeros.T - first), "scales": scales.T.copy()}
    return parts | {"g_idx": groups.astype(np.int32)}, expand(codes, zeros, scales, groups)


def gptq_v2(rng: Any, outputs: int, inputs: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    return gptq(rng, outputs, inputs, 0)


def nvfp4(rng: Any, outputs: int, inputs: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    codes, outer = rng.integers(0, 16, (outputs, inputs)).astype(np.uint8), np.array([700.25], np.float32)
    scales = rng.uniform(0.5, 3, (outputs, inputs // GROUP)).astype(jnp.float8_e4m3fn)
    parts = {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scales, "weight_global_scale": outer}
    return parts, E2M1[codes] * (scales.astype(np.float32) / outer).repeat(GROUP, 1)


def modelopt(rng: Any, outputs: int, inputs: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    parts, _ = nvfp4(rng, outputs, inputs)
    packed, scales, outer = parts["weight_packed"], parts["weight_scale"], np.array(0.00143, np.float32)
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(outputs, inputs)
    parts = {"weight": packed, "weight_scale": scales, "weight_scale_2": outer}
    return parts, E2M1[codes] * (scales.astype(np.float32) * outer).repeat(GROUP, 1)


Writer = Callable[[Any, int, int], tuple[dict[str, np.ndarray], np.ndarray]]
FORMATS: dict[str, tuple[dict[str, Any], Writer]] = {
    "pack-quantized": (PACK, compressed),
    "nvfp4-pack-quantized": (NVFP4, nvfp4),
    "modelopt": (MODELOPT, modelopt),
    "awq": (AWQ, awq),
    "gptq": (GPTQ, gptq),
    "gptq_v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, gptq_v2),
}


def make_folders(tmp_path: Path, source: Path, form: str, kept: Sequence[str] = ()) -> tuple[Path, Path]:
    """Returns a folder in a format and a dense one; "proj" and "mtp.fc" without `kept` in names are small."""
    config, write = FORMATS[form]
    dense, rng = load_file(source / "model.safetensors"), np.random.default_rng(0)
    small = dict(dense)
    for name, tensor in dense.items():
        fits = ("proj" in name or "mtp.fc" in name) and tensor.ndim == 2 and tensor.shape[1] % GROUP == 0
        if fits and not any(part in name for part in kept):
            parts, dense[name] = write(rng, *tensor.shape)
            del small[name]
            small |= {f"{name.removesuffix('weight')}{part}": x for part, x in parts.items()}
    folders = tmp_path / "small", tmp_path / "dense"
    for folder, held in zip(folders, (small, dense), strict=True):
        folder.mkdir()
        save_file(held, folder / "model.safetensors")
        for file in source.glob("*.json"):
            shutil.copy(file, folder)
    raw = json.loads((source / "config.json").read_text())
    (folders[0] / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    return folders


def change(folder: Path, tensors: dict[str, np.ndarray | None]) -> None:
    """Replaces tensors in a folder, in which some may be FP8; None takes one away."""
    with tensor_files.open_folder(folder) as stored:
        held = {name: np.array(tensor[...]) for name, tensor in stored.items()} | tensors
    save_file({name: x for name, x in held.items() if x is not None}, folder / "model.safetensors")


def expand_kept(weights: Any, dtype: Any) -> Any:
    """Returns a tree of weights with the arrays that its kept ones stand for, inputs in the order of the files."""

    def expand(weight: Any) -> Any:
        if not is_quantized(weight):
            return weight
        wide = np.asarray(block_scales.widen(weight.replace(order=None), dtype))
        if weight.order is None:
            return wide
        return wide.reshape(-1, weight.order.size)[:, np.argsort(weight.order)].reshape(wide.shape)

    return jax.tree.map(expand, weights, is_leaf=is_quantized)
