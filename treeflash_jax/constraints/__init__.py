"""Constraints of answers: schemas, patterns, choices and structural tags, as automata over bytes, then over tokens.

`compiler` makes the automata over bytes, `compile_bytes` runs it in a process of its own, `tables` turns bytes into the
tokens of a vocabulary, and `compilation` is what others call.
Imported by the engine and the server.
"""
