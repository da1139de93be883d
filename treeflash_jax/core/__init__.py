"""Devices, sharding, parameters, programs, files, settings and checks. Every other folder imports from here."""
