"""Devices, sharding, parameters, programs, files and checks, independent of language models."""
