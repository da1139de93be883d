"""Drafters propose continuations of a text to the verifier.

A `Drafter` has sizes, shapes of weights, a state and a method that drafts. Decoding uses only what `protocol` declares.
Dialects also read a drafter's fields, and training calls its network. To add a kind, write a file and, in
`formats.dialects`, a dialect that reads its files.
"""

from treeflash_jax.drafters.assistant_drafter import AssistantDrafter
from treeflash_jax.drafters.block.block_drafter import BlockDrafter
from treeflash_jax.drafters.eagle3_drafter import Eagle3Drafter
from treeflash_jax.drafters.language_model_drafter import LanguageModelDrafter
from treeflash_jax.drafters.mtp_drafter import MtpDrafter
from treeflash_jax.drafters.ngram_drafter import NgramDrafter
from treeflash_jax.drafters.protocol import Drafter, Inputs, NewPositions, State

__all__ = [
    "AssistantDrafter", "BlockDrafter", "Drafter", "Eagle3Drafter", "Inputs", "LanguageModelDrafter", "MtpDrafter",
    "NewPositions", "NgramDrafter", "State",
]  # fmt: skip
