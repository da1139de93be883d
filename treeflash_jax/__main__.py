import sys

from treeflash_jax.cli.commands import main

sys.exit(main())
