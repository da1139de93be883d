"""Measurements. Each module is a command: `python -m treeflash_jax.bench.<name> --help`."""
