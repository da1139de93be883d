"""Files: the meaning of model families and file dialects; reading and writing of weights, configs and tokenizers.

`model_files` loads and writes models. Four folders can be extended, each by a file and a line in its `__init__`:
`architectures` (families of verifiers), `dialects` (forms of files), `quant_methods` (quantised weights in folders) and
`messages` (formats of answers).
"""
