"""Constraints of answers: a JSON schema, a pattern or choices become an automaton over bytes, then a table over tokens.

`json_schema` says which schemas are followed, `expressions` compiles schemas and patterns to automata over bytes (by
`byte_automaton`, in another process), `tables` turns these into the tokens of a vocabulary, `compilation` does all of it.
Imported by the engine and the server.
"""
