"""Sampled trees: builders that draw nodes from the drafter, and the distribution that acceptance rules test (`Proposal`).

A builder fixes the outline of its tree before anything is drawn. Then `draw_tokens` draws the tokens.
"""
