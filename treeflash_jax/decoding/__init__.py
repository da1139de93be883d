"""Rounds of speculative decoding, and the compiled loops that run them."""
