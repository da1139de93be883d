"""Decisions of `train.pair`: choices by rule, settings of every stage, time, and extensions."""
