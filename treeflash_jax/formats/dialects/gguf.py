"""GGUF files of Llama, Qwen2, Qwen3 and Qwen3-MoE models: their sizes, and where each weight lies.

Source: ggml-org/llama.cpp, convert_hf_to_gguf.py and src/llama-arch.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from treeflash_jax.core.checks import INT32, QUOTED, clipped, fit, quoted
from treeflash_jax.core.parameters import Entry
from treeflash_jax.formats import gguf_reader
from treeflash_jax.formats.architectures import ARCHITECTURES, Architecture, rope
from treeflash_jax.formats.architectures.architecture import check_heads, check_layers
from treeflash_jax.formats.dialects.dialect import Dialect
from treeflash_jax.formats.gguf_reader import File, Tensor
from treeflash_jax.formats.keys import Keys, is_among
from treeflash_jax.models.config import ModelConfig, Rope

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.{}.gate_proj": "ffn_gate_exps",  # one tensor for all experts of a layer
    "mlp.experts.{}.up_proj": "ffn_up_exps",
    "mlp.experts.{}.down_proj": "ffn_down_exps",
}
_ROPE_DIVISORS = "rope_freqs.weight"

_SIZES = frozenset(
    """block_count context_length embedding_length feed_forward_length vocab_size attention.head_count
    attention.head_count_kv attention.key_length attention.value_length attention.layer_norm_rms_epsilon
    rope.freq_base rope.dimension_count rope.scaling.type rope.scaling.factor rope.scaling.original_context_length
    rope.scaling.attn_factor rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow""".split()
)
# Other keys of an architecture and the only value that changes nothing; None: any value.
_NEUTRAL: dict[str, Any] = {
    "expert_count": 0,
    "expert_used_count": 0,
    "expert_shared_feed_forward_length": 0,
    "attention.sliding_window": 0,
    "rope.scale_linear": 1.0,
    "rope.scaling.finetuned": None,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "tensor_data_layout": "Meta AI original pth",
}


class Gguf(Dialect):
    """The dialect of llama.cpp: config, weights and tokenizer in one file, of the architectures that say `gguf`."""

    name = "gguf"
    part = "verifier"

    def recognises(self, path: Path, keys: Keys) -> bool:
        return gguf_reader.is_gguf(path)

    def read_config(self, path: Path, keys: Keys) -> ModelConfig:
        return verifier_config(gguf_reader.read(path))

    @contextmanager
    def opened(self, path: Path, config: ModelConfig) -> Iterator[dict[str, Tensor]]:
        yield tensors(gguf_reader.read(path), config)

    def entries(self, config: ModelConfig, specs: Any, names: Collection[str]) -> dict[str, Any]:
        published = ARCHITECTURES[config.model_type].entries(specs)

        def here(entry: Entry) -> Entry:
            return replace(entry, name=tensor_name(entry.name), is_stacked=entry.is_apart)

        return jax.tree.map(here, published)

    def stop_ids(self, path: Path, config: ModelConfig) -> tuple[int, ...]:
        return config.eos_token_ids

    def spare(self, config: ModelConfig, specs: Any) -> tuple[str, ...]:
        return (_ROPE_DIVISORS,)  # part of the config


def tensor_name(name: str) -> str:
    """Returns the GGUF name of a Hugging Face tensor."""
    layer, _, inside = re.fullmatch(r"(?:model\.layers\.(\d+)(\.))?(.*)", name).groups()
    stem, _, kind = inside.rpartition(".")
    return (f"blk.{layer}." if layer else "") + f"{_NAMES[stem]}.{kind}"


def tensors(file: File, config: ModelConfig) -> dict[str, Tensor]:
    """Returns the tensors of a file by its own names, their matrix rows in Hugging Face's order.

    llama.cpp rotates neighbouring elements of a Llama head against each other, not its halves; its files are ordered so.
    """
    if not ARCHITECTURES[config.model_type].gguf_rotates_pairs:
        return file.tensors
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}

    def ordered(name: str, tensor: Tensor) -> Tensor:
        count = heads.get(name.rpartition(".")[0].rpartition(".")[2])
        return tensor if count is None else replace(tensor, order=half_rotation_order(count, config.head_dim))

    return {name: ordered(name, tensor) for name, tensor in file.tensors.items()}


def half_rotation_order(heads: int, head_dim: int) -> np.ndarray:
    """Returns the index in the file of each output of a query or key matrix whose head halves are rotated."""
    return np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2).swapaxes(1, 2).ravel()


def verifier_config(file: File) -> ModelConfig:
    """Returns the sizes of a model.

    Raises:
      ValueError: an architecture, key or value that is not implemented, or a missing size.
    """
    where, raw = str(file.path), file.metadata
    kind, architecture = raw.get("general.architecture"), _architecture(file)
    values = {key.removeprefix(f"{kind}."): value for key, value in raw.items() if key.startswith(f"{kind}.")}
    for key, value in values.items():
        if key not in (_SIZES | architecture.gguf_sizes.keys()) and (
            key not in _NEUTRAL or not (_NEUTRAL[key] is None or is_among(value, (_NEUTRAL[key],)))
        ):
            setting = f"{clipped(f'{kind}.{key}', QUOTED)} = {quoted(value)}"
            raise ValueError(f"{where}: {setting} might change the numbers and is not implemented")

    def number(key: str, default: float | None = None, whole: bool = True) -> Any:
        value = values.get(key, default)
        says = f"one {'whole ' * whole}number above 0"
        limits = {"above": 0, "most": INT32} if whole else {"above": 0}
        return fit(int if whole else float, value, f"{kind}.{key} =", where, says=says, **limits)

    num_heads, hidden_size = number("attention.head_count"), number("embedding_length")
    num_kv_heads = number("attention.head_count_kv", num_heads)
    head_dim = number("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if number(key, head_dim) != head_dim:
            raise ValueError(f"{where}: got {kind}.{key} {values[key]}, expected {head_dim}, the length of a key")
    check_heads(where, num_heads, num_kv_heads, head_dim)
    num_layers = number("block_count")
    check_layers(where, num_layers, file.tensors)
    vocab_size = _vocab_size(file, values.get("vocab_size"))
    max_positions = number("context_length")
    sizes = {field: number(key) for key, field in architecture.gguf_sizes.items()}
    if sizes.get("experts_per_token", 0) > sizes.get("num_experts", 0):
        got = f"{kind}.expert_used_count {sizes['experts_per_token']} of {sizes['num_experts']} experts"
        raise ValueError(f"{where}: got {got}, expected at most {sizes['num_experts']}")
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=number("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=number("attention.layer_norm_rms_epsilon", whole=False),
        rope=_rope(file, number, values.get("rope.scaling.type"), head_dim, max_positions),
        max_positions=max_positions,
        tie_embeddings="output.weight" not in file.tensors,
        **architecture.constants,
        **sizes,
        normalize_experts=bool(sizes),  # files do not say; llama.cpp does so for every model that is read here
        model_type=architecture.model_type,
        eos_token_ids=stop_ids(file, vocab_size),
    )


def _architecture(file: File) -> Architecture:
    name, known = file.metadata.get("general.architecture"), {a.gguf: a for a in ARCHITECTURES.values() if a.gguf}
    if not isinstance(name, str) or name not in known:
        expected = " or ".join(map(repr, sorted(known)))
        raise ValueError(f"{file.path}: got general.architecture {quoted(name)}, expected {expected}")
    return known[name]


def stop_ids(file: File, vocab_size: int) -> tuple[int, ...]:
    """Returns the ids that end an answer: those of the end of a text and of a turn."""
    ids = set()
    for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"):
        if key in file.metadata:
            says = f"an id from 0 to {vocab_size - 1}"
            ids.add(fit(int, file.metadata[key], key, str(file.path), says=says, least=0, most=vocab_size - 1))
    return tuple(sorted(ids))


def _vocab_size(file: File, stated: Any) -> int:
    table = file.tensors.get("token_embd.weight")
    if table is None:
        raise ValueError(f"{file.path}: 1 tensors missing, the first is token_embd.weight")
    size, keys = table.shape[0], Keys(file.metadata, str(file.path))
    tokens = keys.value(list[Any] | None, "tokenizer.ggml.tokens", None, "a list of texts")
    for what, count in (("vocab_size", stated), ("tokens", None if tokens is None else len(tokens))):
        if count not in (None, size):
            raise ValueError(
                f"{file.path}: got {what} {quoted(count)} and {size} rows of token_embd.weight, expected equal numbers"
            )
    return size


def _rope(file: File, number: Callable[..., Any], scaling: Any, head_dim: int, max_positions: int) -> Rope:
    """Returns the rotation. llama.cpp multiplies `attn_factor` with YaRN's factor; in transformers it replaces it."""
    if scaling not in (None, "none", "yarn"):
        raise ValueError(f"{file.path}: got rope.scaling.type {quoted(scaling)}, expected none or 'yarn'")
    theta = float(number("rope.freq_base", 10_000.0, whole=False))
    divisors = file.tensors.get(_ROPE_DIVISORS)
    if scaling == "yarn":
        if divisors is not None:
            raise ValueError(f"{file.path}: got {_ROPE_DIVISORS} beside rope.scaling.type 'yarn', expected one of them")
        factor = number("rope.scaling.factor", whole=False)
        return rope.yarn(
            str(file.path),
            theta=theta,
            factor=factor,
            original=number("rope.scaling.original_context_length", max_positions),
            beta_fast=number("rope.scaling.yarn_beta_fast", 32.0, whole=False),
            beta_slow=number("rope.scaling.yarn_beta_slow", 1.0, whole=False),
            attention_factor=number("rope.scaling.attn_factor", 1.0, whole=False) * rope.attention_growth(factor),
        )
    if divisors is None:
        return Rope(theta=theta)
    if divisors.shape != (head_dim // 2,):
        raise ValueError(
            f"{file.path}: tensor {_ROPE_DIVISORS} has shape {list(divisors.shape)}, expected [{head_dim // 2}]"
        )
    return Rope(theta=theta, kind="longrope", divisors=tuple(map(float, divisors[:])))
