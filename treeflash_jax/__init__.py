"""Lossless speculative decoding with draft trees (TreeFlash) in pure JAX.

Example:
  >>> import treeflash_jax as tf
  >>> model = tf.load("smollm2")
  >>> result = model.generate("Why is the sky blue?", max_new_tokens=64)[0]
  >>> print(result.text)
"""

from treeflash_jax.core.programs import keep_programs
from treeflash_jax.core.sharding import make_mesh
from treeflash_jax.engine.answers.drawn_trees import DrawnTree
from treeflash_jax.engine.answers.results import Chunk, Result, Score
from treeflash_jax.engine.call.prompts import Chat, Text
from treeflash_jax.engine.loading import load
from treeflash_jax.engine.model import TreeFlash
from treeflash_jax.engine.schedule.session import Session
from treeflash_jax.engine.settings.generate_config import GenerateConfig
from treeflash_jax.engine.settings.keywords import GenerateSettings

__version__ = "0.1.0"

__all__ = [
    "Chat",
    "Chunk",
    "DrawnTree",
    "GenerateConfig",
    "GenerateSettings",
    "Result",
    "Score",
    "Session",
    "Text",
    "TreeFlash",
    "keep_programs",
    "load",
    "make_mesh",
]


def __dir__() -> list[str]:
    """Lists the public names, without the modules that they come from."""
    return [*__all__, "__version__"]
