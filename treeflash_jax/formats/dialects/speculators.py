"""Block drafters of vLLM's speculators library, and functions for all drafters of this library, which name their verifier.

Slots of sliding layers all see the same window: the positions before the anchor.

Source: vllm-project/speculators. EAGLE-3 drafters of this library are in eagle3_folder.
"""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from treeflash_jax.core.checks import INT32
from treeflash_jax.drafters.block.block_drafter import BlockDrafter
from treeflash_jax.formats.dialects.block_folder import ALIGNMENT, BlockFolder, DFlashFolder
from treeflash_jax.formats.dialects.dialect import OUR_KEY, Dialect
from treeflash_jax.formats.dialects.published_heads import DFlash2, DSpark
from treeflash_jax.formats.keys import Keys
from treeflash_jax.formats.storage import Tensor

OUTSIDE = ("block_size", "num_target_layers", "thinking", OUR_KEY)  # keys besides the layers' that every dialect has
KEYS = tuple(  # keys of drafters of every kind
    """architectures auto_map draft_vocab_size dtype model_type speculators_config speculators_model_type
    speculators_version target_hidden_size tie_word_embeddings torch_dtype transformer_layer_config
    transformers_version""".split()
)
VERSION = "0.7.0"  # version of the library in a new config.json


def read_verifier(keys: Keys) -> tuple[str, ...]:
    """Returns name and classes of the drafter's verifier; () if they are missing."""
    stated = keys.table("speculators_config").table("verifier")
    classes = stated.value(list[str], "architectures", [], "a list of names")
    return (stated.value(str, "name_or_path", None, "a name"), *classes) if "name_or_path" in stated else ()


def describe(algorithm: str, num_depths: int, verifier: tuple[str, ...]) -> dict[str, Any]:
    """Returns the keys of config.json that vLLM needs to serve the folder alone: the verifier and the length of a draft."""
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


def without_lists(path: Path, config: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Leaves out t2d. Leaves out d2t if all tokens are drafted.

    Raises ValueError unless d2t lists increasing ids of the verifier's vocabulary, and the same ids as t2d.
    """
    vocab_size = config.layers.vocab_size
    size = config.draft_vocab_size or vocab_size
    weights = {name: tensor for name, tensor in tensors.items() if name not in ("t2d", "d2t")}
    t2d, d2t = tensors.get("t2d"), tensors.get("d2t")
    if d2t is None:
        return weights
    if tuple(d2t.get_shape()) != (size,):
        raise ValueError(f"{path}: tensor d2t has shape {list(d2t.get_shape())}, expected [{size}] (draft_vocab_size)")
    ids_z = np.arange(size) + np.asarray(d2t[0:size]).astype(np.int64)
    if ids_z.min() < 0 or ids_z.max() >= vocab_size or (np.diff(ids_z) <= 0).any():
        raise ValueError(
            f"{path}: tensor d2t leaves the verifier's vocabulary or its order, expected i + d2t[i] to increase from 0 to "
            f"at most {vocab_size - 1}"
        )
    if t2d is not None:
        is_list = tuple(t2d.get_shape()) == (vocab_size,)
        if not is_list or not np.array_equal(np.flatnonzero(np.asarray(t2d[0:vocab_size])), ids_z):
            raise ValueError(f"{path}: tensors t2d and d2t list different tokens, expected the same")
    return weights if size == vocab_size else weights | {"d2t": d2t}


class SpeculatorsBlock(BlockFolder):
    """A block drafter with the sizes of its layers in `transformer_layer_config`.

    Attributes:
      algorithm: `speculators_model_type`.
      is_noncausal: default of `sliding_window_non_causal`.
      has_draft_vocabulary: whether files with part of the vocabulary are implemented.
    """

    marks = ("speculators_model_type", "transformer_layer_config")
    algorithm: str
    is_noncausal = False
    has_draft_vocabulary = True
    scales_embeddings = False

    def recognises(self, path: Path, keys: Keys) -> bool:
        return Dialect.recognises(self, path, keys) and keys.raw["speculators_model_type"] == self.algorithm

    def read_config(self, path: Path, keys: Keys) -> BlockDrafter:
        moved = ("mask_token_id", "projector_type", *ALIGNMENT, *self.head_keys)  # in dflash_config in other dialects
        read_here = ("aux_hidden_state_layer_ids", "max_anchors", "sliding_window_non_causal")
        keys.check_known({*KEYS, *OUTSIDE, *moved, *read_here})
        layers = keys.table("transformer_layer_config", required=True).raw
        vocab_size = layers.get("vocab_size")
        if not self.has_draft_vocabulary:
            keys.check_only({"draft_vocab_size": (vocab_size,)})
        taps = [number - 1 for number in keys.ids("aux_hidden_state_layer_ids", INT32)]  # files count inputs of layers
        inside = {name: keys.raw[name] for name in moved if name in keys} | {"target_layer_ids": taps}
        outside = {name: keys.raw[name] for name in OUTSIDE if name in keys}
        config = super().read_config(path, Keys({**layers, **outside, "dflash_config": inside}, keys.where))
        size = keys.integer("draft_vocab_size", vocab_size, most=vocab_size)
        is_noncausal = keys.truth("sliding_window_non_causal", self.is_noncausal)
        return replace(
            config,
            verifier=read_verifier(keys),
            causal_layers=() if is_noncausal else config.sliding_layers,
            shared_window=bool(config.sliding_layers),
            draft_vocab_size=0 if size == vocab_size else size,
            owns_vocabulary=size != vocab_size,
        )

    def copies(self, config: BlockDrafter) -> dict[str, str]:
        return super().copies(config) | {"verifier_lm_head.weight": "unembed", "verifier_norm.weight": "norm"}

    def select(self, path: Path, config: BlockDrafter, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return without_lists(path, config, super().select(path, config, tensors))

    def write(self, raw: dict[str, Any], config: BlockDrafter, **head: Any) -> dict[str, Any]:
        """Returns a new config.json from the config of a folder with `dflash_config`."""
        outside = {name: raw[name] for name in ("architectures", *OUTSIDE) if name in raw}
        layers = {name: value for name, value in raw.items() if name not in ("dflash_config", "verifier", *outside)}
        return {
            **outside,
            **describe(self.algorithm, config.num_depths, config.verifier),
            "mask_token_id": config.mask_token_id,
            "aux_hidden_state_layer_ids": [tap + 1 for tap in config.taps],
            "draft_vocab_size": config.layers.vocab_size,
            **head,
            "tie_word_embeddings": False,
            "transformer_layer_config": layers,
        }


class SpeculatorsDFlash(SpeculatorsBlock, DFlashFolder):
    """DFlash drafters."""

    name = "speculators-dflash"
    algorithm = "dflash"

    def to_hf(self, config: BlockDrafter) -> dict[str, Any]:
        return self.write(super().to_hf(config), config)


class SpeculatorsDSpark(SpeculatorsBlock, DSpark, DFlashFolder):
    """DSpark drafters. Only drafters with a low-rank head and no state can be written."""

    name = "speculators-dspark"
    algorithm = "dspark"
    projectors = ("dspark",)
    class_name = "DSparkDraftModel"
    shifted = True
    heads: Collection[str] = ("lowrank",)
    options = ("shifted",)

    def to_hf(self, config: BlockDrafter) -> dict[str, Any]:
        head = {"markov_head_type": "vanilla", "markov_rank": config.head_rank, "enable_confidence_head": False}
        head |= {"confidence_head_with_markov": False, "sample_from_anchor": config.shifted}
        return self.write(super().to_hf(config), config, **head)


class SpeculatorsDFlash2(SpeculatorsBlock, DFlash2):
    """DFlash2 drafters."""

    name = "speculators-dflash2"
    algorithm = "dflash2"
    is_noncausal = True
    has_draft_vocabulary = False
