"""Constraints of answers (schemas, patterns, choices, structural tags) as automata over bytes, then over tokens.

`compiler` makes the automata over bytes, `compile_bytes` runs it in a separate process, and `tables` turns automata over
bytes into automata over the tokens of a vocabulary. Most other code calls `compilation`.
"""
