import sys

from treeflash_jax.cli import main

sys.exit(main())
