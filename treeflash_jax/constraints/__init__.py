"""Constraints of answers: a JSON schema, a pattern or choices become an automaton over bytes, then a table over tokens.

`json_schema` says which schemas are followed, `expressions` compiles what that and patterns mean to automata over bytes,
`tables` turns that into the tokens of a vocabulary; `compilation` does all of it. Imported by the engine and the server.
"""
