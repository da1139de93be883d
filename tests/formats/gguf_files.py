"""Small GGUF files, written as llama.cpp's converter writes them: Llama query and key rows pairwise, names of its own."""

import hashlib
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
from answers import random_weights
from safetensors.numpy import load_file

from treeflash_jax.engine.settings.pairs import locate
from treeflash_jax.formats import model_files
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.models import decoder
from treeflash_jax.models.config import ModelConfig, Rope

F32 = gguf.GGMLQuantizationType.F32
QWEN3 = ModelConfig(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32,
    max_positions=128, rope=Rope(theta=5e5), eos_token_ids=(2,),
)  # fmt: skip
QWEN2 = replace(QWEN3, model_type="qwen2", qk_norm=False, qkv_bias=True, head_dim=16)
LLAMA = replace(QWEN3, model_type="llama", qk_norm=False, tie_embeddings=True, rms_norm_eps=1e-5, head_dim=16)
QWEN3_MOE = replace(
    QWEN3, model_type="qwen3_moe", num_experts=4, experts_per_token=2, expert_size=32, normalize_experts=True
)
YARN = Rope(theta=5e5, kind="yarn", factor=4.0, original_max_positions=32, attention_factor=0.1 * math.log(4) + 1)
MODELS = {
    "qwen3": QWEN3, "llama": LLAMA, "untied llama": replace(LLAMA, tie_embeddings=False), "qwen2": QWEN2,
    "qwen3_moe": QWEN3_MOE, "qwen2 with yarn": replace(QWEN2, tie_embeddings=True, rope=YARN),
}  # fmt: skip


def pairwise(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of halves that are rotated against each other, as the converter stores them: neighbours are."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def as_stored(tensors: dict[str, np.ndarray], config: ModelConfig) -> dict[str, np.ndarray]:
    """The tensors of a Hugging Face file, quantised or not, with llama.cpp's names and its order of rows."""
    architectures = {label: kind for kind, label in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(architectures[config.model_type.replace("_", "")], config.num_layers)
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads} if config.model_type == "llama" else {}
    stored = {}
    for name, x in tensors.items():
        num_heads = heads.get(name.split(".")[-2])
        stored[names.get_name(name, (".weight", ".bias"))] = pairwise(x, num_heads) if num_heads else x
    return stored


def metadata(config: ModelConfig) -> dict[str, Any]:
    """What the converter writes of a config, tokenizer apart."""
    sizes = {
        "block_count": config.num_layers,
        "context_length": config.max_positions,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope.theta,
        "rope.dimension_count": config.head_dim,
    }
    if config.rope.kind == "yarn":
        scaling = {"type": "yarn", "factor": config.rope.factor}
        scaling["original_context_length"] = config.rope.original_max_positions
        sizes |= {f"rope.scaling.{name}": value for name, value in scaling.items()}
    if config.num_experts:
        sizes |= {"expert_count": config.num_experts, "expert_used_count": config.experts_per_token}
        sizes["expert_feed_forward_length"] = config.expert_size
    return sizes


def write(path: Path, config: ModelConfig, tensors: dict, values: dict | None = None, changes: dict | None = None) -> Path:
    """Writes a file.

    Args:
      tensors: (bytes or numbers, type) by GGUF name.
      values: metadata with whole keys, such as those of a tokenizer.
      changes: changes of the architecture's metadata; None takes a key away.
    """
    architecture = config.model_type.replace("_", "")
    writer = gguf.GGUFWriter(path, architecture)
    sizes = {f"{architecture}.{key}": value for key, value in (metadata(config) | (changes or {})).items()}
    for key, value in (sizes | (values or {})).items():
        if value is not None:
            add(writer, key, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    (kinds | {list: writer.add_array})[type(value)](key, value)


def vocabulary(pre: str) -> dict[str, Any]:
    """A byte-level vocabulary on which pre-tokenizers differ: the shipped pair's, and tokens that only some of them reach.

    Some words have lost the merges that make them, so that they are one token only where merges are ignored.
    """
    held = json.loads((locate("tiny") / "tokenizer.json").read_text(encoding="utf-8"))
    size = 8 * (len(held["model"]["vocab"]) // 8)
    tokens = sorted(held["model"]["vocab"], key=held["model"]["vocab"].get)[:size]
    merges = [tuple(merge) for merge in held["model"]["merges"]]
    digits = [str(i) for i in range(10)]
    made = [(a, b) for a in digits for b in digits] + [(a + b, c) for a in "123" for b in digits for c in digits]
    made += [("Ċ", "Ċ"), ("ĠĠ", "ĠĠ"), (".", "Ċ"), (";", "Ċ"), ("'", "s"), ("'", "S"), ("Ġ", "1"), ("(", "x"), ("_", "x")]
    special = {name: 3 for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")}
    tokens = [*dict.fromkeys([*tokens, *(a + b for a, b in made)]), "<tool>", "</tool>", "[PAD3]"]
    kinds = special | {"<tool>": 4, "</tool>": 4, "[PAD3]": 5}
    merges = list(dict.fromkeys(merge for i, merge in enumerate(merges) if i < 400 or i % 5)) + made
    ids = {token: i for i, token in enumerate(tokens)}
    merges = [merge for merge in dict.fromkeys(merges) if {*merge, "".join(merge)} <= ids.keys()]
    entries = {
        "model": "gpt2", "pre": pre, "tokens": tokens, "token_type": [kinds.get(token, 1) for token in tokens],
        "merges": [" ".join(merge) for merge in merges], "bos_token_id": ids["<|im_start|>"],
        "eos_token_id": ids["<|im_end|>"], "add_bos_token": False,
    }  # fmt: skip
    return {f"tokenizer.ggml.{name}": value for name, value in entries.items()}


def digests(tokenizer: Tokenizer, strings: list[str]) -> list[str]:
    """What tests/data/gguf_tokens.json holds of the ids of each string."""
    return [hashlib.sha256(json.dumps(tokenizer.encode(text)).encode()).hexdigest()[:8] for text in strings]


def save_hf(folder: Path, config: ModelConfig, dtype=jnp.float32) -> dict[str, np.ndarray]:
    """A folder of random weights, norms included; its tensors by name."""
    model_files.save_verifier(folder, config, random_weights(decoder.specs(config)), dtype)
    return load_file(folder / "model.safetensors")


def as_gguf(tensors: dict[str, np.ndarray], config: ModelConfig, kind=F32) -> dict:
    """The same tensors as a GGUF file has them: matrices of type `kind`, norms in float32, experts of a layer in one."""
    stored = as_stored({name: x.astype(np.float32) for name, x in stacked(tensors).items()}, config)
    kinds = {name: kind if x.ndim > 1 else F32 for name, x in stored.items()}
    return {name: (gguf.quantize(x, kinds[name]), kinds[name]) for name, x in stored.items()}


def stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same with one tensor for all experts of a layer, which are fewer than ten."""
    parts = {}
    for name, x in sorted(tensors.items()):
        parts.setdefault(re.sub(r"\.experts\.\d", ".experts", name), []).append(x)
    return {name: np.stack(xs) if ".experts." in name else xs[0] for name, xs in parts.items()}


def write_small(
    path: Path, values: dict | None = None, changes: dict | None = None, lose: str = "", kind: str = "F32", **extra
) -> Path:
    words = vocabulary("smollm")
    config = replace(LLAMA, vocab_size=len(words["tokenizer.ggml.tokens"]))
    folder = path.with_suffix(".folder")
    tensors = as_gguf(save_hf(folder, config), config, gguf.GGMLQuantizationType[kind])
    shutil.rmtree(folder)
    tensors = {name: tensor for name, tensor in tensors.items() if name != lose} | extra
    return write(path, config, tensors, words | (values or {}), changes)
