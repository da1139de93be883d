"""Measurements: `run` compares systems, `latency` times phases, `memory` counts bytes."""
