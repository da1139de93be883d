"""Hugging Face folders: configs and weights of verifiers and drafters, both ways, under the published names.

This file alone knows tensor names: it says where each weight lies (`storage.Entry`), storage.py moves the bytes.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from treeflash_jax import files, quantized
from treeflash_jax.checks import read_json
from treeflash_jax.config import FILE_OF_HEAD, DrafterConfig, ModelConfig, token_ids
from treeflash_jax.drafters import block
from treeflash_jax.drafters.block.heads import HEADS
from treeflash_jax.formats import gguf, gguf_models, gguf_tokenizer, safetensors, storage
from treeflash_jax.params import Entry, Spec
from treeflash_jax.verifiers import forward as verifier

Dialect = Literal["dflash", "treeflash"]

_LINEAR = {"order": (1, 0), "rows": 1}  # [in, out] here, [out, in] on disk
_TO_HEADS = {"order": (1, 2, 0), "rows": 2}  # [in, heads, head_dim] here, [heads head_dim, in] on disk

_LAYER = {
    "attention_norm": Entry("input_layernorm.weight"),
    "q": Entry("self_attn.q_proj.weight", **_TO_HEADS),
    "k": Entry("self_attn.k_proj.weight", **_TO_HEADS),
    "v": Entry("self_attn.v_proj.weight", **_TO_HEADS),
    "o": Entry("self_attn.o_proj.weight", order=(2, 0, 1), rows=1),
    "q_norm": Entry("self_attn.q_norm.weight"),
    "k_norm": Entry("self_attn.k_norm.weight"),
    "mlp_norm": Entry("post_attention_layernorm.weight"),
    "gate": Entry("mlp.gate_proj.weight", **_LINEAR),
    "up": Entry("mlp.up_proj.weight", **_LINEAR),
    "down": Entry("mlp.down_proj.weight", **_LINEAR),
}


def is_hub_id(name: str | Path) -> bool:
    """Whether a name has the form of a Hub id, owner/model."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)) is not None


def cached(hub_id: str, revision: str | None = None) -> Path | None:
    """The folder of a Hub id in the Hub's local cache; None unless config and weights are there."""
    try:
        folder = download(hub_id, revision, local_files_only=True)
    except ValueError:
        return None
    return folder if (folder / "config.json").exists() and any(folder.glob("*.safetensors")) else None


def download(hub_id: str, revision: str | None = None, local_files_only: bool = False) -> Path:
    """The folder of a Hub id in the Hub's local cache, its files downloaded where needed.

    Raises:
      ValueError: not reachable on the Hub.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        kinds = ["*.json", "*.safetensors", "*.jinja"]
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=kinds, local_files_only=local_files_only))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        cause = type(error).__name__
        raise ValueError(
            f"{hub_id} is no folder here and could not be had from the Hub ({cause}); "
            "give a local folder with config.json and model.safetensors instead"
        ) from None


def read_verifier_config(folder: str | Path) -> ModelConfig:
    if gguf.is_gguf(folder):
        return gguf_models.verifier_config(gguf.read(folder))
    path = Path(folder) / "config.json"
    return ModelConfig.from_hf(read_json(path), str(path))


def read_drafter_config(folder: str | Path) -> DrafterConfig:
    path = Path(folder) / "config.json"
    return DrafterConfig.from_hf(read_json(path), str(path))


def load_verifier(
    folder: str | Path, *, dtype: Any = jnp.float32, mesh=None, quantize: str | None = None
) -> tuple[ModelConfig, dict[str, Any]]:
    """Reads a Qwen3 (dense) or Llama model.

    Args:
      folder: with config.json and model.safetensors, whole or in parts; or a GGUF file.
      dtype: of the parameters; bfloat16 files load bit for bit into bfloat16.
      mesh: where they go; each device's host reads its own slices only. None: the default device.
      quantize: "int8" rounds every matrix as it arrives; devices hold one of them in `dtype` at a time.

    Raises:
      ValueError: anything missing, unknown, damaged, mis-shaped or not implemented.
    """
    quantized.check_scheme(quantize)
    folder = Path(folder)
    config = read_verifier_config(folder)
    specs = verifier.specs(config)
    finish = partial(quantized.compress, scheme=quantize, mesh=mesh)
    entries = _verifier_entries(specs)
    if gguf.is_gguf(folder):
        entries = jax.tree.map(lambda entry: replace(entry, name=gguf_models.tensor_name(entry.name)), entries)
        tensors = gguf_models.tensors(gguf.read(folder))
        if quantize and any(tensor.is_quantized for tensor in tensors.values()):
            warnings.warn(f"{folder} holds quantised weights; quantize={quantize!r} rounds them again", stacklevel=2)
        return config, storage.load(folder, tensors, specs, entries, dtype, mesh, gguf_models.SPARE, finish)
    spare = ("lm_head.weight",) if config.tie_embeddings else ()  # some files repeat the tied table
    with safetensors.open_folder(folder) as tensors:
        return config, storage.load(folder, tensors, specs, entries, dtype, mesh, spare, finish)


def load_drafter(folder: str | Path, *, dtype: Any = jnp.float32, mesh=None) -> tuple[DrafterConfig, dict[str, Any]]:
    """Reads a drafter folder in either dialect: its config, and the weights of its `specs`.

    Raises:
      ValueError: as `load_verifier`.
    """
    folder = Path(folder)
    config = read_drafter_config(folder)
    specs = block.specs(config)
    with safetensors.open_folder(folder) as tensors:
        prefix = "model." if any(name.startswith("model.") for name in tensors) else ""
        params = storage.load(folder, tensors, specs, _drafter_entries(specs, config, prefix), dtype, mesh)
    return config, params


def stop_ids(folder: str | Path, config: ModelConfig) -> tuple[int, ...]:
    """Ids that end an answer: config.json's and generation_config.json's, united.

    Raises:
      ValueError: a generation_config.json that cannot be read, or ids outside the vocabulary.
    """
    if gguf.is_gguf(folder):
        return config.eos_token_ids
    path = Path(folder) / "generation_config.json"
    raw = read_json(path) if os.path.lexists(path) else {}
    ids = token_ids(raw.get("eos_token_id"), str(path), config.vocab_size)
    return tuple(sorted({*config.eos_token_ids, *ids}))


def save_verifier(folder: str | Path, config: ModelConfig, params: dict[str, Any], dtype: Any = jnp.bfloat16) -> None:
    """Writes config.json and model.safetensors as transformers would.

    Raises:
      ValueError: quantised weights, or shapes that are not the config's.
    """
    scheme = quantized.scheme_of(params)
    if scheme:
        raise ValueError(f"got weights in {scheme}, expected those of the files: load without quantize to save them")
    specs = verifier.specs(config)
    architecture = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[config.model_type]
    raw = {"architectures": [architecture], **_layers_to_hf(config), "dtype": jnp.dtype(dtype).name}
    _save(Path(folder), raw, specs, _verifier_entries(specs), params, dtype)


def save_drafter(
    folder: str | Path,
    config: DrafterConfig,
    params: dict[str, Any],
    *,
    dialect: Dialect = "treeflash",
    dtype: Any = jnp.bfloat16,
) -> None:
    """Writes a drafter that the published PyTorch code loads.

    Args:
      folder: created if missing.
      config: of the drafter.
      params: weights of its `specs`, "backbone" and "head".
      dialect: "treeflash" (`model.` prefix, head weights) or "dflash" (no prefix, no head).
      dtype: on disk.

    Raises:
      ValueError: a head in the dialect that has none.
    """
    if dialect == "dflash" and config.head != "marginal":
        raise ValueError(f"got a {config.head} head, expected none: the DFlash dialect stores no head")
    specs = block.specs(config)
    prefix = "model." if dialect == "treeflash" else ""
    raw = {
        "architectures": ["TreeFlashDraftModel" if dialect == "treeflash" else "DFlashDraftModel"],
        **_layers_to_hf(config.layers),
        "block_size": config.block_size,
        "dflash_config": {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)},
        "num_target_layers": config.num_target_layers,
        "layer_types": ["full_attention"] * config.layers.num_layers,
        "dtype": jnp.dtype(dtype).name,
    }
    if dialect == "treeflash":
        raw["treeflash_config"] = {
            "candidate_tokens": config.num_nodes,
            "ar_approximation": FILE_OF_HEAD[config.head],
            "drafter_temperature": config.drafter_temperature,
        } | ({} if config.sampled_above is None else {"sampled_above": config.sampled_above})
    _save(Path(folder), raw, specs, _drafter_entries(specs, config, prefix), params, dtype)


def convert_drafter(source: str | Path, target: str | Path, dialect: Dialect, *, drop_head: bool = False) -> None:
    """Writes a drafter's files in another dialect, bit for bit.

    Args:
      source: folder in either dialect.
      target: new folder; it appears when all of it is written.
      dialect: of the new files.
      drop_head: leave a head behind that the dialect cannot hold.

    Raises:
      ValueError: a head that the dialect cannot hold, unless it is to be dropped; a target that is there already.
    """
    files.check_folder(target)
    with safetensors.open_folder(Path(source)) as tensors:
        kinds = {tensor.get_dtype() for tensor in tensors.values()}
    if len(kinds) > 1:
        raise ValueError(f"{source}: got tensors of types {sorted(kinds)}, expected one")
    dtype = {"BF16": jnp.bfloat16, "F16": jnp.float16, "F32": jnp.float32}.get(kinds.pop(), jnp.float32)
    config, params = load_drafter(source, dtype=dtype)
    if drop_head:
        config, params = replace(config, head="marginal"), params | {"head": {}}
    elif dialect == "dflash" and config.head != "marginal":
        raise ValueError(
            f"got a drafter with a {config.head} head, which DFlash files cannot hold; drop it with --drop-head"
        )
    with files.filled(target) as folder:
        save_drafter(folder, config, params, dialect=dialect, dtype=dtype)


def convert_gguf(source: str | Path, target: str | Path, dtype: Any = jnp.float32) -> None:
    """Writes a GGUF file as a Hugging Face folder: configs, weights and tokenizer.

    Args:
      source: GGUF file.
      target: new folder; it appears when all of it is written.
      dtype: on disk; float32 holds what the quantised types mean exactly.

    Raises:
      ValueError: as `load_verifier`, or a target that is there already.
    """
    files.check_folder(target)
    file = gguf.read(source)
    texts = gguf_tokenizer.files(file)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        config, params = load_verifier(source, dtype=dtype)
    roles = {"bos": "bos_token_id", "padding": "pad_token_id"}
    ids = {roles[role]: i for role, i in gguf_tokenizer.special_ids(file).items() if role in roles}
    texts["generation_config.json"] = json.dumps({"eos_token_id": list(config.eos_token_ids), **ids}, indent=2) + "\n"
    with files.filled(target) as folder:
        save_verifier(folder, config, params, dtype)
        for name, text in texts.items():
            files.write(folder / name, text)


def _layer_entries(specs: dict[str, Spec], prefix: str) -> dict[str, Entry]:
    return {key: replace(_LAYER[key], name=prefix + _LAYER[key].name) for key in specs}


def _group_entries(groups: list[list[dict[str, Spec]]], prefix: str) -> list[list[dict[str, Entry]]]:
    index = iter(range(sum(map(len, groups))))
    return [[_layer_entries(layer, f"{prefix}layers.{next(index)}.") for layer in group] for group in groups]


def _verifier_entries(specs: dict[str, Any]) -> dict[str, Any]:
    entries = {
        "embed": Entry("model.embed_tokens.weight", order=(0, 1)),
        "groups": _group_entries(specs["groups"], "model."),
        "norm": Entry("model.norm.weight"),
    }
    return entries | ({"unembed": Entry("lm_head.weight", order=(0, 1))} if "unembed" in specs else {})


def _drafter_entries(specs: dict[str, Any], config: DrafterConfig, prefix: str) -> dict[str, Any]:
    backbone = {
        "fc": Entry(prefix + "fc.weight", **_LINEAR),
        "hidden_norm": Entry(prefix + "hidden_norm.weight"),
        "groups": _group_entries(specs["backbone"]["groups"], prefix),
        "norm": Entry(prefix + "norm.weight"),
    }
    return {"backbone": backbone, "head": dict(HEADS[config.head].ENTRIES)}


def _layers_to_hf(config: ModelConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": config.rope.kind, "rope_theta": config.rope.theta}
    if config.rope.kind == "llama3":
        extra = asdict(config.rope)
        rope |= {key: extra[key] for key in ("factor", "low_freq_factor", "high_freq_factor")}
        rope["original_max_position_embeddings"] = config.rope.original_max_positions
    if config.rope.kind == "longrope":
        divisors = list(config.rope.divisors)
        rope |= {"short_factor": divisors, "long_factor": divisors, "factor": 1.0, "attention_factor": 1.0}
        rope["original_max_position_embeddings"] = config.max_positions
    eos = list(config.eos_token_ids)
    return {
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_parameters": rope,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tie_embeddings,
        "eos_token_id": eos[0] if len(eos) == 1 else (eos or None),
    }


def _save(folder: Path, raw: dict[str, Any], specs: Any, entries: Any, params: Any, dtype: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    storage.save(folder / "model.safetensors", specs, entries, params, dtype)
    files.write(folder / "config.json", json.dumps(raw, indent=2) + "\n")
