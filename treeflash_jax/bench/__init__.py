"""Measurements, as commands of `treeflash bench`."""
