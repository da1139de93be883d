"""Answers: results with their statistics, texts of tokens, drawn trees.

A field of a result is added in `results`; how the tokens of a growing answer become text is known to `answer_text` alone.
Imported by the model and by whatever shows answers.
"""
