"""Lossless speculative decoding with draft trees (TreeFlash) in pure JAX.

Example:
  >>> import treeflash_jax as tf
  >>> model = tf.load("tiny")
  >>> result = model.generate("What is 3 + 4?", max_new_tokens=32)[0]
"""

from treeflash_jax.draw import DrawnTree
from treeflash_jax.loading import load
from treeflash_jax.mesh import make_mesh
from treeflash_jax.model import TreeFlash
from treeflash_jax.results import Chunk, Result
from treeflash_jax.settings import GenerateConfig

__version__ = "0.1.0"

__all__ = ["Chunk", "DrawnTree", "GenerateConfig", "Result", "TreeFlash", "load", "make_mesh"]


def __dir__() -> list[str]:
    """The public names, and none of the modules that they come from."""
    return [*__all__, "__version__"]
