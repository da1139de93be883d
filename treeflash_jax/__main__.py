"""Runs the command line: `python -m treeflash_jax` is the same as `treeflash`."""

import sys

from treeflash_jax.cli.commands import main

sys.exit(main())
