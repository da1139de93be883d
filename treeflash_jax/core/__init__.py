"""Devices, sharding, parameters, costs, files and checks: nothing here knows of language models."""
