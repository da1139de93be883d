"""Drafters of vLLM's speculators library, which name their verifier: what they share, and DFlash among them.

Source: vllm-project/speculators. EAGLE-3 drafters in this form are in eagle3_folder.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from treeflash_jax.core.checks import INT32
from treeflash_jax.drafters.block.block_drafter import BlockConfig
from treeflash_jax.formats.dialects.block_folder import DFlash
from treeflash_jax.formats.keys import Keys
from treeflash_jax.formats.storage import Tensor

VERSION = "0.7.0"  # of the library whose config.json is written
COPIES = "embed_tokens.weight lm_head.weight verifier_lm_head.weight verifier_norm.weight t2d d2t".split()


def read_verifier(keys: Keys) -> tuple[str, ...]:
    """Returns name and classes of the drafter's verifier; () if they are not stated."""
    stated = keys.table("speculators_config").table("verifier")
    classes = stated.value(list[str], "architectures", [], "a list of names")
    return (stated.value(str, "name_or_path", None, "a name"), *classes) if "name_or_path" in stated else ()


def describe(algorithm: str, num_depths: int, verifier: tuple[str, ...]) -> dict[str, Any]:
    """Returns keys of config.json with which vLLM serves the folder alone: the verifier, and the length of a draft."""
    stated = {"model_type": "speculators", "speculators_model_type": algorithm, "speculators_version": VERSION}
    if not verifier:
        return stated
    method = {"proposal_type": "greedy", "speculative_tokens": num_depths, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return stated | {
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": verifier[0], "architectures": list(verifier[1:])},
        }
    }


class SpeculatorsDFlash(DFlash):
    """DFlash drafters that draft from the whole vocabulary."""

    name = "speculators-dflash"
    marks = ("speculators_model_type", "transformer_layer_config")
    outer_keys = frozenset(
        """architectures auto_map aux_hidden_state_layer_ids block_size draft_vocab_size dtype mask_token_id max_anchors
        model_type num_target_layers projector_type sample_from_anchor shift_label speculators_config speculators_model_type
        speculators_version target_hidden_size thinking tie_word_embeddings torch_dtype transformer_layer_config
        transformers_version""".split()
    )

    def recognises(self, path: Path, keys: Keys) -> bool:
        return super().recognises(path, keys) and keys.raw["speculators_model_type"] == "dflash"

    def read_config(self, path: Path, keys: Keys) -> BlockConfig:
        keys.check_known(self.outer_keys)
        keys.check_only({"projector_type": ("dflash",), "sample_from_anchor": (False,), "shift_label": (False, None)})
        layers = keys.table("transformer_layer_config", required=True).raw
        keys.check_only({"draft_vocab_size": (layers.get("vocab_size"),)})
        taps = [number - 1 for number in keys.ids("aux_hidden_state_layer_ids", INT32)]  # counted as inputs of layers
        inside = {"mask_token_id": keys.raw.get("mask_token_id"), "target_layer_ids": taps}
        others = {name: keys.raw[name] for name in ("block_size", "num_target_layers", "thinking") if name in keys}
        config = super().read_config(path, Keys({**layers, **others, "dflash_config": inside}, keys.where))
        return replace(config, verifier=read_verifier(keys))

    @contextmanager
    def opened(self, path: Path, config: BlockConfig) -> Iterator[dict[str, Tensor]]:
        """Opens the tensors, without copies of the verifier's weights and lists of the whole vocabulary."""
        with super().opened(path, config) as tensors:
            yield {name: tensor for name, tensor in tensors.items() if name not in COPIES}

    def to_hf(self, config: BlockConfig) -> dict[str, Any]:
        raw = super().to_hf(config)
        outside = {name: raw.pop(name) for name in ("architectures", "block_size", "num_target_layers")}
        outside |= {"thinking": raw.pop("thinking")} if "thinking" in raw else {}
        layers = {name: value for name, value in raw.items() if name not in ("dflash_config", "verifier")}
        return {
            **outside,
            **describe("dflash", config.num_depths, config.verifier),
            "mask_token_id": config.mask_token_id,
            "aux_hidden_state_layer_ids": [tap + 1 for tap in config.taps],
            "draft_vocab_size": config.layers.vocab_size,
            "tie_word_embeddings": False,
            "transformer_layer_config": layers,
        }
