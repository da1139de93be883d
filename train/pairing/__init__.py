"""Decisions of `train.pair`: choices by rule, and settings of every stage."""
