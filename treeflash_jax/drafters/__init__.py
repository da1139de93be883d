"""Drafters propose continuations of a text to the verifier.

A drafter is an object, a `DrafterConfig`: its sizes, its weights' shapes, its state and its draft. Decoding, files,
benchmarks and training reach it through these methods only. A new kind is one file and one line in DRAFTERS.
"""

from treeflash_jax.drafters.block.block_drafter import BlockConfig
from treeflash_jax.drafters.eagle3_drafter import Eagle3Config
from treeflash_jax.drafters.language_model_drafter import LanguageModelConfig
from treeflash_jax.drafters.ngram import NgramConfig
from treeflash_jax.drafters.protocol import DrafterConfig, Inputs, State

DRAFTERS: dict[str, type[DrafterConfig]] = {
    "block": BlockConfig,
    "eagle3": Eagle3Config,
    "language_model": LanguageModelConfig,
    "ngram": NgramConfig,
}


__all__ = [
    "DRAFTERS", "BlockConfig", "DrafterConfig", "Eagle3Config", "Inputs", "LanguageModelConfig", "NgramConfig", "State",
]  # fmt: skip
