"""Conversion of files from one dialect to another."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from treeflash_jax.core import files
from treeflash_jax.formats import draft_vocabulary, gguf_reader, gguf_tokenizer, models, safetensors, storage


def convert_drafter(source: str | Path, target: str | Path, dialect: str, *, drop_head: bool = False) -> None:
    """Writes a drafter's files in another dialect, bit for bit.

    Args:
      target: new folder; it appears when it is complete.
      dialect: name of the dialect to write.
      drop_head: leave out a block drafter's head, which some dialects cannot store.

    Raises:
      ValueError: a dialect that cannot be written, a drafter that it cannot store, or a target that exists.
    """
    files.check_folder(target)
    config = models.read_drafter_config(source)
    written = models.writable(dialect, config)
    if not drop_head:
        written.to_hf(config)  # refuses before weights are read
    with safetensors.open_folder(Path(source)) as tensors:
        kinds = {tensor.get_dtype() for tensor in tensors.values()} - {*storage.WHOLE, "BOOL"}
    if len(kinds) != 1:
        raise ValueError(f"{source}: got tensors of types {sorted(kinds)}, expected one type")
    dtype = {"BF16": jnp.bfloat16, "F16": jnp.float16, "F32": jnp.float32}.get(kinds.pop(), jnp.float32)
    config, params = models.load_drafter(source, dtype=dtype)
    if drop_head:
        config, params = written.without_head(config, params)
    with files.filled(target) as folder:
        models.save_drafter(folder, config, params, dialect=dialect, dtype=dtype)
        if (Path(source) / draft_vocabulary.NAME).exists():
            files.write(folder / draft_vocabulary.NAME, (Path(source) / draft_vocabulary.NAME).read_bytes())


def convert_gguf(source: str | Path, target: str | Path, dtype: Any = jnp.float32) -> None:
    """Writes a GGUF file as a Hugging Face folder: configs, weights and tokenizer.

    Args:
      target: new folder; it appears when it is complete.
      dtype: dtype on disk; float32 represents all quantised types exactly.

    Raises:
      ValueError: as `models.load_verifier`, or a target that exists.
    """
    files.check_folder(target)
    file = gguf_reader.read(source)
    texts = gguf_tokenizer.files(file)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        config, params = models.load_verifier(source, dtype=dtype)
    roles = {"bos": "bos_token_id", "padding": "pad_token_id"}
    ids = {roles[role]: i for role, i in gguf_tokenizer.special_ids(file).items() if role in roles}
    texts["generation_config.json"] = json.dumps({"eos_token_id": list(config.eos_token_ids), **ids}, indent=2) + "\n"
    with files.filled(target) as folder:
        models.save_verifier(folder, config, params, dtype)
        for name, text in texts.items():
            files.write(folder / name, text)
