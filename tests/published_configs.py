"""config.json of published models, to the letter, and folders in published layouts."""

import shutil
from pathlib import Path
from typing import Any

from conftest import DATA
from safetensors.numpy import load_file, save_file

from treeflash_jax.formats import dialects
from treeflash_jax.formats.keys import Keys


def parse(part: str, raw: dict, where: str = "config.json") -> Any:
    """Returns the config of a verifier or drafter that a config.json states."""
    keys, path = Keys(raw, where), Path(where)
    return dialects.recognise(path, keys, part).read_config(path, keys)


def without(raw: dict, *keys: str) -> dict:
    return {key: value for key, value in raw.items() if key not in keys}


def deepspec_folder(folder: Path, form: str, tensors: dict) -> Path:
    """Makes a DSpark folder as DeepSpec writes it, with copies of the tables of the verifier of a_treeflash."""
    tables = load_file(DATA / "conformance" / "a_treeflash" / "verifier" / "model.safetensors")
    embed = tables["model.embed_tokens.weight"]
    copies = {"embed_tokens.weight": embed, "lm_head.weight": tables.get("lm_head.weight", embed).copy()}
    folder.mkdir()
    shutil.copy(DATA / "published" / form / "config.json", folder)
    save_file(tensors | copies, folder / "model.safetensors")
    return folder


QWEN3_4B = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560, "initializer_range": 0.02,
    "intermediate_size": 9728, "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3",
    "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.42.3",
    "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
TREEFLASH_4B = {
    **QWEN3_4B, "architectures": ["TreeFlashDraftModel"], "num_hidden_layers": 5, "tie_word_embeddings": False,
    "block_size": 16, "num_target_layers": 36, "layer_types": ["full_attention"] * 5,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "treeflash_config": {"candidate_tokens": 64, "ar_approximation": "swiglu"},
}  # fmt: skip
QWEN25_7B_YARN = {  # with the recipe of its card for long contexts
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
    "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944,
    "max_position_embeddings": 32768, "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.43.1",
    "use_cache": True, "use_sliding_window": False, "vocab_size": 152064,
    "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
}  # fmt: skip
