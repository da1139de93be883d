"""GGUF files of Gemma 4, written from the fixtures as llama.cpp's converter writes them, tokenizer included."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import DATA
from gguf_files import F32, add, gguf
from model_files import assert_same
from published_configs import without
from refusals import refused
from safetensors.numpy import load_file

from treeflash_jax.formats import model_files
from treeflash_jax.formats.tokenizer import Tokenizer

NAMES = ("gemma4", "gemma4_moe", "gemma4_edge")
SPECIAL = {
    "layer_scalar": "layer_output_scale.weight", "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale", "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}  # fmt: skip


def metadata(raw: dict) -> dict[str, Any]:
    """What the converter writes of a config.json."""
    windowed = [kind == "sliding_attention" for kind in raw["layer_types"]]
    full = raw["per_layer_config"][str(windowed.index(False))] if "per_layer_config" in raw else raw
    heads = full.get("num_global_key_value_heads") or full.get("num_key_value_heads", raw["num_key_value_heads"])
    head_dim = full.get("global_head_dim", full["head_dim"])
    shared, rope = raw["num_kv_shared_layers"], raw["rope_parameters"]
    wide = 2 if raw["use_double_wide_mlp"] else 1
    widths = [raw["intermediate_size"] * (wide if i >= len(windowed) - shared else 1) for i in range(len(windowed))]
    values = {
        "block_count": len(windowed), "context_length": raw["max_position_embeddings"],
        "embedding_length": raw["hidden_size"], "feed_forward_length": widths if wide == 2 else widths[0],
        "attention.head_count": raw["num_attention_heads"],
        "attention.head_count_kv": [raw["num_key_value_heads"] if x else heads for x in windowed],
        "attention.key_length": head_dim, "attention.value_length": head_dim, "rope.dimension_count": head_dim,
        "attention.key_length_swa": raw["head_dim"], "attention.value_length_swa": raw["head_dim"],
        "rope.dimension_count_swa": raw["head_dim"], "attention.sliding_window": raw["sliding_window"],
        "attention.sliding_window_pattern": windowed, "attention.shared_kv_layers": shared,
        "attention.layer_norm_rms_epsilon": raw["rms_norm_eps"],
        "final_logit_softcapping": raw["final_logit_softcapping"],
        "embedding_length_per_layer_input": raw["hidden_size_per_layer_input"],
        "rope.freq_base": rope["full_attention"]["rope_theta"],
        "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
    }  # fmt: skip
    if raw["enable_moe_block"]:
        values |= {"expert_count": raw["num_experts"], "expert_used_count": raw["top_k_experts"]}
        values["expert_feed_forward_length"] = raw["moe_intermediate_size"]
    return values


def write(path: Path, name: str, changes: dict | None = None, words: dict | None = None, divisors: Any = None) -> Path:
    """Writes the text model of a fixture; `changes` are of the architecture's metadata, None takes a key away."""
    raw = json.loads((DATA / "hybrid" / name / "config.json").read_text())
    text, tensors = raw["text_config"], load_file(DATA / "hybrid" / name / "model.safetensors")
    theirs = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, text["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, "gemma4")
    values = {f"gemma4.{key}": value for key, value in (metadata(text) | (changes or {})).items()}
    values["tokenizer.ggml.eos_token_id"] = text["eos_token_id"][0]
    for key, value in (values | (words or {})).items():
        if value is not None:
            add(writer, key, value)
    for tensor, x in tensors.items():
        if not tensor.startswith("model.language_model."):
            continue
        tensor = tensor.replace("language_model.", "")
        _, _, number, inside = [*tensor.split(".", 3), "", "", ""][:4]
        stored = f"blk.{number}.{SPECIAL[inside]}" if inside in SPECIAL else theirs.get_name(tensor, (".weight",))
        writer.add_tensor(stored, np.ascontiguousarray(x), raw_dtype=F32)
    head_dim, share = metadata(text)["attention.key_length"], text["rope_parameters"]["full_attention"]
    rotated = int(head_dim * share["partial_rotary_factor"] / 2)
    divisors = [1.0] * rotated + [1e30] * (head_dim // 2 - rotated) if divisors is None else divisors
    writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32), raw_dtype=F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", NAMES)
def test_files_load_as_the_folder_they_were_made_of(tmp_path, name):
    """Configs and weights, bit for bit, without keys and values of layers that share others'."""
    config, params = model_files.load_verifier(write(tmp_path / "x.gguf", name))
    expected, weights = model_files.load_verifier(DATA / "hybrid" / name)
    assert without(vars(config), "eos_token_ids") == without(vars(expected), "eos_token_ids")
    assert_same(params, weights)


@pytest.mark.parametrize("changes, words", [
    ({"attention.sliding_window_pattern": [True] * 6}, ("attention.sliding_window_pattern", "layers of both kinds")),
    ({"attention.sliding_window_pattern": [True, False]}, ("one for each of 6 layers",)),
    ({"attention.head_count_kv": [2, 1, 1, 2, 2, 1]}, ("attention.head_count_kv", "layers of one kind")),
    ({"feed_forward_length": [80, 80, 80, 80, 80, 96]}, ("feed_forward_length", "doubled in layers that share")),
    ({"attention.value_length_swa": 8}, ("attention.value_length 8", "16, the length of a key")),
    ({"attention.scale": 2.0}, ("attention.scale", "changes numbers")),
])  # fmt: skip
def test_refused_metadata(tmp_path, changes, words):
    refused(lambda: model_files.load_verifier(write(tmp_path / "x.gguf", "gemma4", changes)), *words)


def test_another_rotation_is_refused(tmp_path):
    path = write(tmp_path / "x.gguf", "gemma4", divisors=[1.0] * 4 + [8.0] * 12)
    refused(lambda: model_files.load_verifier(path), "rope_freqs.weight", "16 divisors: 1, then 1e30")


def test_the_tokenizer_is_that_of_transformers(tmp_path):
    """Spaces are ▁, characters without a token are bytes, and control tokens are one each."""
    from transformers.models.gemma.tokenization_gemma import GemmaTokenizer

    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>"]
    held = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = [*"▁thelowr\n", "th", "the", "▁the", "lo", "low", "▁low", "▁▁", "\n\n"]
    merges = ["t h", "th e", "▁ the", "l o", "lo w", "▁ low", "▁ ▁", "\n \n"]
    tokens = [*special, *held, *pieces]
    words = {
        "model": "gemma4", "tokens": tokens, "scores": [0.0] * len(tokens), "merges": merges, "add_space_prefix": False,
        "token_type": [3] * 4 + [3, 3] + [6] * 256 + [1] * len(pieces), "add_bos_token": True, "bos_token_id": 2,
        "unknown_token_id": 3, "padding_token_id": 0,
    }  # fmt: skip
    words = {f"tokenizer.ggml.{key}": value for key, value in words.items()}
    tokenizer = Tokenizer.load(write(tmp_path / "x.gguf", "gemma4", words=words))
    vocab = {token: i for i, token in enumerate(tokens)}
    theirs = GemmaTokenizer(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in merges])
    theirs.add_special_tokens({"additional_special_tokens": ["<|turn>", "<turn|>"]})
    for text in ("the low", " the  lower\n\nthe é", "<|turn>low\n<turn|>\n", "", "x▁the"):
        ids = tokenizer.encode(text)
        assert ids == [2, *theirs.encode(text, add_special_tokens=False)], text
        assert tokenizer.inner.decode(ids[1:], clean_up_tokenization_spaces=False) == text.replace("▁", " ")
