"""Constraints of answers: a JSON schema, a pattern or choices become an automaton over bytes, then a table over tokens.

`compiler` turns schemas, patterns and choices into automata over bytes, `compile_bytes` runs it in a process of its own,
`tables` turns bytes into the tokens of a vocabulary, and `compilation` is what others call.
Imported by the engine and the server.
"""
