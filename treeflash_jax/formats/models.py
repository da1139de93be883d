"""Verifiers and drafters in folders and files: configs and weights, read and written by dialect."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from treeflash_jax import drafters
from treeflash_jax.core.checks import quoted, read_json
from treeflash_jax.formats import dialects, gguf_reader, storage
from treeflash_jax.formats.dialects import Dialect
from treeflash_jax.formats.keys import Keys
from treeflash_jax.models import quantized, verifier
from treeflash_jax.models.config import ModelConfig


def read_verifier_config(path: str | Path) -> ModelConfig:
    """Returns the sizes of the verifier in a folder, a GGUF file or a config.json. Raises ValueError as `load_verifier`."""
    return _find(path, "verifier")[1]


def read_drafter_config(path: str | Path) -> Any:
    """Returns the config of the drafter in a folder or a config.json. Raises ValueError as `load_drafter`."""
    return _find(path, "drafter")[1]


def load_verifier(
    path: str | Path, *, dtype: Any = jnp.float32, mesh=None, quantize: str | None = None
) -> tuple[ModelConfig, dict[str, Any]]:
    """Reads a verifier: its config and its weights.

    Args:
      path: a folder with config.json and model.safetensors, whole or in parts; or a GGUF file.
      dtype: dtype of the weights; bfloat16 files load bit for bit into bfloat16.
      mesh: mesh to shard the weights over; each host reads only the slices of its devices. None: the default device.
      quantize: "int8" rounds every matrix when it is read, so that devices store one matrix in `dtype` at a time.

    Raises:
      ValueError: anything missing, unknown, damaged, mis-shaped or not implemented.
    """
    quantized.check_scheme(quantize)
    dialect, config = _find(path, "verifier")
    return config, _load(path, dialect, config, verifier.specs(config), dtype, mesh, quantize)


def load_drafter(path: str | Path, *, dtype: Any = jnp.float32, mesh=None) -> tuple[Any, dict[str, Any]]:
    """Reads a drafter in any dialect: its config and its weights. Raises ValueError as `load_verifier`."""
    dialect, config = _find(path, "drafter")
    return config, _load(path, dialect, config, drafters.get(config).specs(config), dtype, mesh)


def stop_ids(path: str | Path, config: ModelConfig) -> tuple[int, ...]:
    """Returns the ids that end an answer of a verifier. Raises ValueError for a damaged file or bad ids."""
    path = Path(path)
    return dialects.recognise(path, Keys({}, str(path)), "verifier").stop_ids(path, config)


def save_verifier(folder: str | Path, config: ModelConfig, params: dict[str, Any], dtype: Any = jnp.bfloat16) -> None:
    """Writes config.json and model.safetensors as transformers would. Raises ValueError for quantised weights."""
    scheme = quantized.quantization_scheme(params)
    if scheme:
        raise ValueError(f"got weights in {scheme}, expected those of the files: load without quantize to save them")
    _save(Path(folder), dialects.DIALECTS["huggingface"], config, verifier.specs(config), params, dtype)


def save_drafter(
    folder: str | Path, config: Any, params: dict[str, Any], *, dialect: str | None = None, dtype: Any = jnp.bfloat16
) -> None:
    """Writes a drafter that the published PyTorch code of its dialect loads.

    Args:
      folder: created if missing.
      params: weights of its specs; those of a block drafter are {"backbone": ..., "head": ...}.
      dialect: name of one of `dialects.written()`; None: the usual one of this kind of drafter.

    Raises:
      ValueError: no such dialect, or one that cannot store this drafter.
    """
    kind = drafters.get(config)
    _save(Path(folder), writable(dialect or kind.DIALECT, config), config, kind.specs(config), params, dtype)


def writable(dialect: str, config: Any = None) -> Dialect:
    """Returns a dialect by name. Raises ValueError for one that is unknown, or cannot store drafters of this kind."""
    known = dialects.written()
    if dialect not in known:
        raise ValueError(f"got dialect {quoted(dialect)}, expected one of {', '.join(known)}")
    result = dialects.DIALECTS[dialect]
    if config is not None and result.kind not in (None, config.kind):
        raise ValueError(
            f"got dialect {quoted(dialect)} for a drafter of kind {config.kind!r}, expected one of that kind; this dialect "
            f"holds drafters of kind {result.kind!r}"
        )
    return result


def _find(path: str | Path, part: str) -> tuple[Dialect, Any]:
    """Returns the dialect of a folder or file, and its config."""
    path = Path(path)
    if gguf_reader.is_gguf(path):
        keys = Keys({}, str(path))
    else:
        config_json = path if path.is_file() else path / "config.json"
        keys = Keys(read_json(config_json), str(config_json))
    dialect = dialects.recognise(path, keys, part)
    return dialect, dialect.read_config(path, keys)


def _load(path, dialect: Dialect, config, specs, dtype, mesh, quantize: str | None = None) -> Any:
    with dialect.opened(Path(path), config) as tensors:
        if quantize and any(getattr(tensor, "is_quantized", False) for tensor in tensors.values()):
            warnings.warn(f"{path} holds quantised weights; quantize={quantize!r} rounds them again", stacklevel=3)
        entries = dialect.entries(config, specs, tensors.keys())
        finish = partial(quantized.compress, scheme=quantize, mesh=mesh)
        return storage.load(Path(path), tensors, specs, entries, dtype, mesh, dialect.spare(config, specs), finish)


def _save(folder: Path, dialect: Dialect, config: Any, specs: Any, params: Any, dtype: Any) -> None:
    dialect.to_hf(config)  # raises before the folder is made
    folder.mkdir(parents=True, exist_ok=True)
    dialect.save(folder, config, specs, params, dtype)
