"""Text of models, files and users on standard output: raw in pipes, without control characters in terminals."""

import sys
from typing import Any

from rich import console
from rich.text import Text

from treeflash_jax.core.checks import printable


def shown(text: str, is_terminal: bool) -> str:
    """Returns text as it is printed; terminals obey control characters, which become escapes such as \\x1b there."""
    return printable(text) if is_terminal else text


def show(text: str, end: str = "\n") -> None:
    """Prints text."""
    print(shown(text, sys.stdout.isatty()), end=end, flush=True)


class Console(console.Console):
    """A console of rich that prints strings, also those in tables, as `show` does, without highlighting or emoji."""

    def __init__(self, **options: Any):
        super().__init__(highlight=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(shown(text, self.is_terminal), **options)
