"""Lossless speculative decoding with draft trees (TreeFlash) in pure JAX.

Example:
  >>> import treeflash_jax as tf
  >>> model = tf.load("tiny")
  >>> result = model.generate("What is 3 + 4?", max_new_tokens=32)[0]
"""

from treeflash_jax.generate import Chunk, GenerateConfig, Result, TreeFlash, load
from treeflash_jax.mesh import make_mesh

__version__ = "0.1.0"

__all__ = ["Chunk", "GenerateConfig", "Result", "TreeFlash", "load", "make_mesh"]
