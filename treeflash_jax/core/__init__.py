"""Devices, sharding, parameters, programs, files, settings, checks, texts of errors. Other folders import from here."""
