"""GGUF files of Llama, Qwen2, Qwen3, Qwen3-MoE and Gemma 4: metadata as a config.json, and the location of each weight.

Source: ggml-org/llama.cpp, convert_hf_to_gguf.py and src/llama-arch.cpp.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np

from treeflash_jax.core.parameters import Entry
from treeflash_jax.formats import gguf_blocks, gguf_reader
from treeflash_jax.formats.architectures import ARCHITECTURES, rope
from treeflash_jax.formats.architectures.gemma4_gguf import ROPE_DIVISORS
from treeflash_jax.formats.dialects.dialect import Dialect
from treeflash_jax.formats.gguf_reader import File, GgufTensor
from treeflash_jax.formats.gguf_tokenizer import end_ids
from treeflash_jax.formats.keys import Keys
from treeflash_jax.models.config import ModelConfig

_SIZES = {  # keys of config.json: keys of the architecture
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
}
# Other keys of the architecture that are read, and a key without effect.
_ALSO_READ = """vocab_size attention.head_count_kv attention.key_length attention.value_length
    attention.layer_norm_rms_epsilon rope.freq_base rope.dimension_count rope.scaling.type rope.scaling.factor
    rope.scaling.original_context_length rope.scaling.attn_factor rope.scaling.yarn_beta_fast
    rope.scaling.yarn_beta_slow rope.scaling.finetuned""".split()
_NEUTRAL = {  # further keys, each with the only value that has no effect
    "expert_count": 0,
    "expert_used_count": 0,
    "expert_shared_feed_forward_length": 0,
    "attention.sliding_window": 0,
    "rope.scale_linear": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "tensor_data_layout": "Meta AI original pth",
}


class Gguf(Dialect):
    """The dialect of llama.cpp: config, weights and tokenizer in a file, for architectures that have `gguf`."""

    name = "gguf"
    part = "verifier"

    def recognises(self, path: Path, keys: Keys) -> bool:
        return gguf_reader.is_gguf(path)

    def read_config(self, path: Path, keys: Keys) -> ModelConfig:
        file = gguf_reader.read(path)
        raw = _as_config_json(file)
        config = ARCHITECTURES[raw["model_type"]].read(Keys(raw, str(file.path)))
        return replace(config, eos_token_ids=tuple(sorted({*config.eos_token_ids})))

    @contextmanager
    def opened(self, path: Path, config: ModelConfig) -> Iterator[dict[str, GgufTensor]]:
        """Opens the tensors by the file's names, with the outputs of matrices in Hugging Face's order.

        llama.cpp rotates neighbouring elements of a Llama head against each other, instead of its halves. Its files order
        outputs accordingly.
        """
        tensors = dict(gguf_reader.read(path).tensors)
        tensors.pop(ROPE_DIVISORS, None)  # part of the config
        architecture = ARCHITECTURES[config.model_type]
        tensors = {name: tensor for name, tensor in tensors.items() if architecture.gguf_reads(name, config)}
        if architecture.gguf_rotates_pairs:
            heads = {"attn_q.weight": config.num_heads, "attn_k.weight": config.num_kv_heads}
            for name, tensor in tensors.items():
                if count := heads.get(name.rpartition("blk.")[2].partition(".")[2]):
                    pairs = np.arange(count * config.head_dim).reshape(count, config.head_dim // 2, 2)
                    tensors[name] = replace(tensor, order=pairs.swapaxes(1, 2).ravel())
        yield {name: gguf_blocks.grouped(tensor) for name, tensor in tensors.items()}

    def entries(self, config: ModelConfig, specs: Any, names: Collection[str]) -> dict[str, Any]:
        architecture = ARCHITECTURES[config.model_type]
        kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.gguf)
        theirs = gguf.get_tensor_name_map(kind, config.num_layers)

        def renamed(entry: Entry) -> Entry:
            name = entry.name.replace(".{}", "")  # GGUF files have one tensor for all experts of a layer
            _, _, number, inside = [*name.split(".", 3), "", "", ""][:4]
            if inside in architecture.gguf_names:
                name = f"blk.{number}.{architecture.gguf_names[inside]}"
            else:
                name = theirs.get_name(name, (".weight", ".bias"))
            return replace(entry, name=name, is_stacked=entry.is_apart or entry.is_stacked)

        return jax.tree.map(renamed, architecture.entries(specs))


def _as_config_json(file: File) -> dict[str, Any]:
    """Returns a file's sizes as keys of config.json. Raises ValueError for a key or value that is not implemented."""
    metadata = file.metadata
    known = {a.gguf: a for a in ARCHITECTURES.values() if a.gguf}
    kind = metadata.get("general.architecture")
    is_known = isinstance(kind, str) and kind in known
    file.keys.expect(is_known, "general.architecture", kind, " or ".join(map(repr, known)))
    architecture = known[kind]
    sizes = _SIZES | architecture.gguf_sizes
    values = {key.removeprefix(f"{kind}."): value for key, value in metadata.items() if key.startswith(f"{kind}.")}
    keys = Keys(values, f"{file.path}: {kind}")
    more = {}
    if architecture.gguf_keys:
        raw, more = architecture.gguf_keys(keys, file.tensors)
        keys = replace(keys, raw=raw)
    keys.check_known({*sizes.values(), *_ALSO_READ, *_NEUTRAL})
    keys.check_only({key: (value,) for key, value in _NEUTRAL.items() if key not in sizes.values()})
    raw: dict[str, Any] = {key: keys.integer(name) for key, name in sizes.items()}
    head_dim = keys.integer("attention.key_length", raw["hidden_size"] // raw["num_attention_heads"])
    for key in ("attention.value_length", "rope.dimension_count"):
        keys.expect(keys.integer(key, head_dim) == head_dim, key, keys.raw.get(key), f"{head_dim}, the length of a key")
    if "rope_parameters" not in more:
        more = more | {"rope_parameters": _rope(file, keys, head_dim, raw["max_position_embeddings"])}
    if architecture.gguf_sizes:
        raw["norm_topk_prob"] = True  # not in files, but llama.cpp normalises in all implemented mixtures of experts
    return raw | {
        "model_type": architecture.model_type,
        "vocab_size": _vocab_size(file, values.get("vocab_size")),
        "num_key_value_heads": keys.integer("attention.head_count_kv", raw["num_attention_heads"]),
        "head_dim": head_dim,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": end_ids(file),
        **more,
    }


def _vocab_size(file: File, stated: Any) -> int:
    table = file.tensors.get("token_embd.weight")
    if table is None:
        raise ValueError(f"{file.path}: tensors missing: 1, the first is token_embd.weight")
    size = table.shape[0]
    tokens = file.keys.value(list[Any] | None, "tokenizer.ggml.tokens", None, "a list of texts")
    for what, count in (("vocab_size", stated), ("tokens", None if tokens is None else len(tokens))):
        file.keys.expect(count in (None, size), what, count, f"{size}, the length of token_embd.weight")
    return size


def _rope(file: File, keys: Keys, head_dim: int, max_positions: int) -> dict[str, Any]:
    """Returns `rope_parameters`. `attn_factor` multiplies YaRN's factor in llama.cpp, and replaces it in transformers."""
    scaling = keys.raw.get("rope.scaling.type")
    file.keys.expect(scaling in (None, "none", "yarn"), "rope.scaling.type", scaling, "none or 'yarn'")
    if scaling is None:
        keys.check_only({"rope.scaling.factor": (0, 1)})  # if there is no type, llama.cpp divides frequencies by this
    if scaling != "yarn":
        keys.check_only({"rope.scaling.attn_factor": (1,)})
    raw = {"rope_theta": keys.number("rope.freq_base", 10_000.0)}
    tensor = file.tensors.get(ROPE_DIVISORS)
    if scaling == "yarn":
        if tensor is not None:
            raise ValueError(f"{file.path}: got {ROPE_DIVISORS} beside rope.scaling.type 'yarn', expected one of them")
        factor = keys.number("rope.scaling.factor")
        return raw | {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length", max_positions),
            "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
            "attention_factor": keys.number("rope.scaling.attn_factor", 1.0) * rope.attention_growth(factor),
        }
    if tensor is None:
        return raw
    if tensor.shape != (head_dim // 2,):
        raise ValueError(f"{file.path}: tensor {ROPE_DIVISORS} has shape {list(tensor.shape)}, expected [{head_dim // 2}]")
    divisors = tensor[:].tolist()
    return raw | {"rope_type": "longrope", "short_factor": divisors, "long_factor": divisors, "attention_factor": 1.0}
