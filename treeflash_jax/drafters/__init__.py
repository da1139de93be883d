"""Drafters: what proposes continuations to the verifier."""
