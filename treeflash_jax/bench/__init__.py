"""Measurements: `run` compares systems, `latency` times phases, `memory` counts bytes, `check` compares answers.

`command_loading` loads the models of these commands, and of those in `cli`.
"""
