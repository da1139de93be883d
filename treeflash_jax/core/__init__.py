"""Devices, sharding, parameters, programs, files and checks. Of language models, names of settings only (`ALIASES`)."""
