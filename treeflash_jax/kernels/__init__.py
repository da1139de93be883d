"""Pallas kernels, imported by attention.py alone, when they are asked for."""
