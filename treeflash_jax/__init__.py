"""Lossless speculative decoding with draft trees (TreeFlash) in pure JAX."""
