"""Lossless speculative decoding with draft trees (TreeFlash) in pure JAX.

Example:
  >>> import treeflash_jax as tf
  >>> model = tf.load("smollm2")
  >>> result = model.generate("Why is the sky blue?", max_new_tokens=64)[0]
  >>> print(result.text)
"""

from treeflash_jax.draw import DrawnTree
from treeflash_jax.loading import load
from treeflash_jax.mesh import make_mesh
from treeflash_jax.model import TreeFlash
from treeflash_jax.prompts import Text
from treeflash_jax.results import Chunk, Result
from treeflash_jax.session import Session
from treeflash_jax.settings import GenerateConfig

__version__ = "0.1.0"

__all__ = ["Chunk", "DrawnTree", "GenerateConfig", "Result", "Session", "Text", "TreeFlash", "load", "make_mesh"]


def __dir__() -> list[str]:
    """Lists the public names, without the modules that they come from."""
    return [*__all__, "__version__"]
