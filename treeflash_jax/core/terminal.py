"""Printing of text from models, files and users: unchanged into pipes, without control characters on terminals."""

import sys
from typing import Any

from rich import console
from rich.text import Text

from treeflash_jax.core.error_text import printable


def shown(text: str, is_terminal: bool) -> str:
    """Returns text as it is printed: for terminals, which obey control characters, these become escapes such as \\x1b."""
    return printable(text) if is_terminal else text


def show(text: str, end: str = "\n") -> None:
    """Prints text."""
    print(shown(text, sys.stdout.isatty()), end=end, flush=True)


class Console(console.Console):
    """A rich console that prints strings, also inside tables, as `show` does: without highlighting or emoji."""

    def __init__(self, **options: Any):
        super().__init__(highlight=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(shown(text, self.is_terminal), **options)
