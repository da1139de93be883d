"""Answers: results with their statistics, texts of tokens, drawn trees.

A field of a result is added in `results`.
Imported by the model and by whatever shows answers.
"""
