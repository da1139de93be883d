"""Lossless speculative decoding with draft trees (TreeFlash) in pure JAX.

Example:
  >>> import treeflash_jax as tf
  >>> model = tf.load("smollm2")
  >>> result = model.generate("Why is the sky blue?", max_new_tokens=64)[0]
  >>> print(result.text)
"""

from treeflash_jax.core.sharding import make_mesh
from treeflash_jax.engine.batching import Session
from treeflash_jax.engine.generate_config import GenerateConfig
from treeflash_jax.engine.loading import load
from treeflash_jax.engine.model import TreeFlash
from treeflash_jax.engine.prompts import Text
from treeflash_jax.engine.results import Chunk, DrawnTree, Result

__version__ = "0.1.0"

__all__ = ["Chunk", "DrawnTree", "GenerateConfig", "Result", "Session", "Text", "TreeFlash", "load", "make_mesh"]


def __dir__() -> list[str]:
    """Lists the public names, without the modules that they come from."""
    return [*__all__, "__version__"]
