"""The compiler of constraints to automata over bytes. It needs only Python and NumPy (and `referencing` for schemas).

`compile_process` runs in a separate process, so that a huge constraint cannot end the caller. Of the package around it, it
imports only `formats.string_schemas`. `schema_reader` and `type_keywords` turn a schema into `atoms`. `values` writes atoms
as `terms`, which are sets of byte strings, with the help of `arrays`, `objects`, `json_texts`, `patterns`, `numerals`,
`text_formats` and `characters`. `structural_tags`, with `qwen_parameters`, puts text around them. `byte_automaton` makes
the smallest automaton.
"""
