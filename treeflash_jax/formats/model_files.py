"""Verifiers and drafters in folders and files: reads, writes and converts their configs and weights, by dialect."""

import json
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from treeflash_jax.core import files
from treeflash_jax.core.checks import expect
from treeflash_jax.core.error_text import quoted, warn
from treeflash_jax.core.json_files import read_json
from treeflash_jax.core.parameters import Params
from treeflash_jax.drafters.protocol import Drafter
from treeflash_jax.formats import (
    dialects,
    draft_vocabulary,
    gguf_reader,
    gguf_tokenizer,
    kept_weights,
    storage,
    tensor_files,
    tokenizer,
)
from treeflash_jax.formats.dialects import Dialect
from treeflash_jax.formats.keys import Keys
from treeflash_jax.models import decoder, quantized
from treeflash_jax.models.config import ModelConfig

ASSISTANT = "assistant"  # name of a drafter's folder inside a verifier's folder


@dataclass(frozen=True)
class ModelFiles:
    """Files of a verifier or drafter, with the config that `open_files` read. Each method opens the tensors again."""

    path: Path
    dialect: Dialect
    config: Any  # of a verifier: ModelConfig; of a drafter: the Drafter, without its weights

    def open_tensors(self) -> AbstractContextManager[dict[str, storage.Tensor]]:
        """Opens the tensors from which weights are read, under the names in the dialect's entries."""
        return self.dialect.opened(self.path, self.config)

    def stored_scheme(self) -> str | None:
        """Returns the scheme (`quantized.SCHEMES`) of the weights in the files; None: they are not quantised."""
        with self.open_tensors() as tensors:
            return kept_weights.find_scheme(tensors)

    def find_specs(self, *, dtype: DTypeLike, mesh: Mesh | None = None, quantize: str | None = None) -> Any:
        """Returns the specs of the weights that `load` reads, divided as in quantised files. Reads no weights."""
        with self.open_tensors() as tensors:
            specs = self._specs()
            if not kept_weights.can_keep(quantize, kept_weights.find_scheme(tensors)):
                return quantized.specs(specs, quantize, mesh)
            entries = self.dialect.entries(self.config, specs, tensors.keys())
            return kept_weights.divide(tensors, specs, entries, dtype, mesh)[0]

    def load(
        self,
        *,
        dtype: DTypeLike = jnp.float32,
        mesh: Mesh | None = None,
        quantize: str | None = None,
        wide_tables: bool = False,
    ) -> Params:
        """Reads the weights.

        Args:
          dtype: dtype of the weights; bfloat16 files load bit for bit into bfloat16.
          mesh: mesh to shard the weights over; each host reads only the slices of its devices. None: the default device.
          quantize: scheme (`quantized.SCHEMES`) to which every matrix is rounded when it is read, so devices hold one in
            `dtype` at a time. "fp8" keeps the weights of FP8 files as they are, and "int4" keeps the weights of other
            quantised files. None expands them to `dtype`. For drafters: only schemes that keep their weights.
          wide_tables: whether `quantize` leaves a verifier's vocabulary tables unquantised.
        """
        specs = self._specs(wide_tables)
        with self.open_tensors() as tensors:
            entries = self.dialect.entries(self.config, specs, tensors.keys())
            if kept_weights.can_keep(quantize, kept_weights.find_scheme(tensors)):
                return kept_weights.load(self.path, tensors, specs, entries, dtype, mesh)
            if quantize and any(getattr(tensor, "is_quantized", False) for tensor in tensors.values()):
                warn(f"{self.path} holds quantised weights; quantize={quantize!r} rounds them again")
            finish = partial(quantized.compress, scheme=quantize, mesh=mesh)
            return storage.load(self.path, tensors, specs, entries, dtype, mesh, finish)

    def check_copies(self, verifier: "ModelFiles") -> None:
        """Raises ValueError if tables in a drafter's files differ from the verifier's, which are used instead of them.

        The rounded tables of GGUF files are not compared.
        """
        names = self.dialect.copies(self.config)
        if not names or gguf_reader.is_gguf(verifier.path):
            return
        with tensor_files.open_folder(self.path) as copies, verifier.open_tensors() as tensors:
            entries = verifier.dialect.entries(verifier.config, decoder.specs(verifier.config), tensors.keys())
            for copy, name in names.items():
                original = entries.get(name, entries["embed"]).name  # a file with tied tables has only one
                if copy in copies and not storage.are_equal(copies[copy], tensors[original]):
                    got = f"{copy} differs from {original} of the verifier"
                    raise ValueError(f"{self.path}: got {got}, expected a copy: load the verifier that it was trained for")

    def _specs(self, wide_tables: bool = False) -> Any:
        is_verifier = self.dialect.part == "verifier"
        return decoder.specs(self.config, wide_tables=wide_tables) if is_verifier else self.config.specs()


def open_files(path: str | Path, part: str) -> ModelFiles:
    """Recognises the dialect of a verifier's or drafter's files and reads their config.

    Args:
      path: a folder with config.json and model.safetensors, whole or in parts; a GGUF file; or, to read no weights, a
        config.json.
      part: "verifier" or "drafter".

    This and the methods raise ValueError for anything missing, unknown, damaged, mis-shaped or not implemented.
    """
    path, is_gguf = Path(path), gguf_reader.is_gguf(path)
    file = path if is_gguf or path.is_file() else path / "config.json"
    keys = Keys({} if is_gguf else read_json(file), str(file))
    dialect = dialects.recognise(path, keys, part)
    return ModelFiles(path, dialect, dialect.read_config(path, keys))


def read_verifier_config(path: str | Path) -> ModelConfig:
    """Returns the sizes of the verifier in a folder, a GGUF file or a config.json. Raises `open_files`' ValueError."""
    return open_files(path, "verifier").config


def read_drafter_config(path: str | Path) -> Drafter:
    """Returns the drafter in a folder or a config.json, without its weights. Raises `open_files`' ValueError."""
    return open_files(path, "drafter").config


def load_verifier(path: str | Path, *, quantize: str | None = None, **options: Any) -> tuple[ModelConfig, Params]:
    """Reads a verifier: its config and its weights. Arguments are those of `open_files` and `ModelFiles.load`."""
    quantized.check_scheme(quantize)
    verifier = open_files(path, "verifier")
    return verifier.config, verifier.load(quantize=quantize, **options)


def load_drafter(path: str | Path, **options: Any) -> tuple[Drafter, Params]:
    """Reads a drafter: its config and its weights. Arguments are those of `open_files` and `ModelFiles.load`."""
    drafter = open_files(path, "drafter")
    return drafter.config, drafter.load(**options)


def find_included_drafter(path: str | Path) -> Path | None:
    """Returns the folder of the drafter that a verifier's files contain, for `load_drafter`; None if they contain none.

    This is the verifier's folder if it has a multi-token prediction layer, or else its folder "assistant".
    """
    path = Path(path)
    if any(name.startswith("mtp.") for name in tensor_files.names(path)):
        return path
    return path / ASSISTANT if (path / ASSISTANT / "config.json").exists() else None


def read_generation_config(path: str | Path) -> dict[str, Any]:
    """Returns the content of a verifier's generation_config.json; {} if there is none. Raises ValueError if damaged."""
    file = Path(path) / "generation_config.json"
    return read_json(file) if os.path.lexists(file) else {}


def stop_ids(path: str | Path, config: ModelConfig) -> tuple[int, ...]:
    """Returns the ids that end an answer of a verifier: ids in its config and in a generation_config.json beside it.

    Raises ValueError for a damaged file or bad ids.
    """
    keys = Keys(read_generation_config(path), f"{path}/generation_config.json")
    ids = keys.ids("eos_token_id", config.vocab_size - 1, required=False)
    return tuple(sorted({*config.eos_token_ids, *ids}))


def save_verifier(folder: str | Path, config: ModelConfig, params: Params, dtype: DTypeLike = jnp.bfloat16) -> None:
    """Writes config.json and model.safetensors as transformers would. Raises ValueError for quantised weights."""
    scheme = quantized.quantization_scheme(params)
    if scheme:
        raise ValueError(f"got weights in {scheme}, expected those of the files: load with quantize='none' to save them")
    dialects.DIALECTS["huggingface"].save(Path(folder), config, decoder.specs(config), params, dtype)


def save_drafter(
    folder: str | Path, config: Drafter, params: Params, *, dialect: str | None = None, dtype: DTypeLike = jnp.bfloat16
) -> None:
    """Writes a drafter that the published PyTorch code of its dialect loads.

    Args:
      folder: target; created if missing.
      params: weights as in the drafter's specs; for a block drafter, {"backbone": ..., "head": ...}.
      dialect: name in `dialects.written()`; None: the default dialect of this kind of drafter.

    Raises ValueError if there is no such dialect, or if it cannot store this drafter.
    """
    writable(dialect or config.dialect, config).save(Path(folder), config, config.specs(), params, dtype)


def writable(dialect: str, config: Drafter | None = None) -> Dialect:
    """Returns a dialect by name.

    Raises ValueError if the dialect is unknown, or cannot store this kind of drafter or this drafter's weights.
    """
    known = dialects.written()
    expect(dialect in known, "dialect", dialect, f"one of {', '.join(known)}")
    result = dialects.DIALECTS[dialect]
    if config is not None and result.kind not in (None, config.kind):
        raise ValueError(
            f"got dialect {quoted(dialect)} for a drafter of kind {config.kind!r}, expected one of that kind; this dialect "
            f"holds drafters of kind {result.kind!r}"
        )
    if config is not None:
        storage.pair_entries(config.specs(), result.entries(config, config.specs(), ()))
    return result


def convert_drafter(source: str | Path, target: str | Path, dialect: str, *, drop_head: bool = False) -> None:
    """Writes a drafter's files in another dialect, bit for bit. Copies its tokenizer, if it has one.

    Args:
      target: new folder, which appears when it is complete.
      dialect: name of the dialect to write.
      drop_head: whether to leave out a block drafter's head, which some dialects cannot store.

    Raises ValueError if the dialect cannot be written, if it cannot store the drafter, or if the target exists.
    """
    files.check_folder(target)
    drafter = open_files(source, "drafter")
    config = drafter.config
    written = writable(dialect, drafter.config)
    written.to_hf(written.without_head(config, {})[0] if drop_head else config)  # raises its errors before weights are read
    with drafter.open_tensors() as tensors:
        kinds = {tensor.get_dtype() for tensor in tensors.values()} - {*storage.WHOLE, "BOOL"}
    dtypes = {"BF16": jnp.bfloat16, "F16": jnp.float16, "F32": jnp.float32}
    if len(kinds) != 1 or not kinds <= dtypes.keys():
        raise ValueError(f"{source}: got tensors of types {sorted(kinds)}, expected one of {', '.join(dtypes)}")
    dtype = dtypes[kinds.pop()]
    params = drafter.load(dtype=dtype)
    if drop_head:
        config, params = written.without_head(config, params)
    with files.filled(target) as folder:
        save_drafter(folder, config, params, dialect=dialect, dtype=dtype)
        for name in (draft_vocabulary.NAME, "generation_config.json", *tokenizer.FILES):
            if (Path(source) / name).exists():
                files.write(folder / name, (Path(source) / name).read_bytes())


def convert_gguf(source: str | Path, target: str | Path, dtype: DTypeLike = jnp.float32) -> None:
    """Writes a GGUF file as a Hugging Face folder: configs, weights and tokenizer.

    Args:
      target: new folder, which appears when it is complete.
      dtype: dtype on disk; float32 represents the values of all quantised types exactly.

    Raises `open_files`' ValueError, and ValueError if the target exists.
    """
    files.check_folder(target)
    file = gguf_reader.read(source)
    texts = gguf_tokenizer.tokenizer_files(file)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        config, params = load_verifier(source, dtype=dtype)
    roles = {"bos": "bos_token_id", "padding": "pad_token_id"}
    ids = {roles[role]: i for role, i in gguf_tokenizer.special_ids(file).items() if role in roles}
    texts["generation_config.json"] = json.dumps({"eos_token_id": list(config.eos_token_ids), **ids}, indent=2) + "\n"
    with files.filled(target) as folder:
        save_verifier(folder, config, params, dtype)
        for name, text in texts.items():
            files.write(folder / name, text)
