"""Answers: results with their statistics, texts of tokens, drawn trees.

A field of a result is declared in `results` and read from the decoding state in `result_reader`.
"""
