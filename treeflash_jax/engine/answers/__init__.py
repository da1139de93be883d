"""What comes back: results with their statistics, texts of tokens, drawn trees. Imported by the model and the server.

A field of a result is added in `results`; how tokens become text is known to `answer_text` alone.
"""
