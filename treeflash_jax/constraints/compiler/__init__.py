"""The compiler of constraints: automata over bytes, by nothing but Python and NumPy.

`compile_process` runs in a process of its own, since a huge constraint must not end others, and imports nothing of the
package around it. `schema_reader` and `type_keywords` turn a schema into `atoms`; `values` writes these as `terms`, sets
of byte strings, with `arrays`, `objects`, `json_texts`, `patterns`, `numerals`, `text_formats` and `characters`;
`structural_tags`, with `qwen_parameters`, puts text around them; `byte_automaton` makes the smallest automaton. Imported
by `constraints.compile_bytes` and `tables`, and by tests.
"""
