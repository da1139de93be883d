"""Rounds of speculative decoding, and the compiled loops that run them, as pure functions.

`rounds` has one round, `loops` the programs of a batch, `state` their plans and data. The arithmetic of a new sampling
setting belongs in `processors`.
"""
