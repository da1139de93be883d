"""Measurements. Each module is a command: `python -m treeflash_jax.bench.<name> --help`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from treeflash_jax.arguments import Parser


def standalone(
    doc: str | None, add_arguments: Callable[[argparse.ArgumentParser], None], argv: Sequence[str] | None
) -> int:
    """Runs one suite as a program of its own; bad input ends with one line on stderr and status 2."""
    parser = Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments)
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
