"""`AnsweringModel`: the model, as its answers read it."""

from typing import Protocol

from jax.sharding import Mesh

from treeflash_jax.decoding.state import Weights
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.models.config import ModelConfig


class AnsweringModel(Protocol):
    """The attributes of a `TreeFlash` that its answers read; `TreeFlash` describes them."""

    verifier: ModelConfig
    weights: Weights
    tokenizer: Tokenizer | None
    mesh: Mesh | None
