"""Devices, sharding, parameters, programs, files and checks. Only setting names (`ALIASES`) concern language models."""
