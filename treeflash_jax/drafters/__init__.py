"""Drafters propose continuations of a text to the verifier.

A drafter is an object, a `DrafterConfig`: its sizes, its weights' shapes, its state and its draft. Decoding, files,
benchmarks and training reach it through these methods only. A new kind is one file; a file dialect reads it.
"""

from treeflash_jax.drafters.block.block_drafter import BlockConfig
from treeflash_jax.drafters.eagle3_drafter import Eagle3Config
from treeflash_jax.drafters.language_model_drafter import LanguageModelConfig
from treeflash_jax.drafters.mtp_drafter import MtpConfig
from treeflash_jax.drafters.ngram import NgramConfig
from treeflash_jax.drafters.protocol import DrafterConfig, Inputs, State

__all__ = [
    "BlockConfig", "DrafterConfig", "Eagle3Config", "Inputs", "LanguageModelConfig", "MtpConfig", "NgramConfig", "State",
]  # fmt: skip
