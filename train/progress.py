"""Progress of long work: one live bar in a terminal, plain lines elsewhere, and a table at the end."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from train import hosts


class Bar:
    """A live line at the bottom of a terminal; silent without a terminal and on all hosts but the first.

    What is printed meanwhile appears above it and stays. The bar itself vanishes when it is closed.

    Example:
      >>> with Bar("answers", total=100) as bar:
      ...     bar.update(40, "evaluating 3 of 16")
    """

    def __init__(self, what: str, total: int, done: int = 0):
        self.inner: Progress | None = None
        if not (hosts.is_first() and sys.stdout.isatty()):
            return
        columns = (TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeRemainingColumn(compact=True))
        note = TextColumn("{task.fields[note]}", markup=False)
        self.inner = Progress(*columns, note, transient=True, console=Console(file=sys.stdout))
        self.task = self.inner.add_task(what, total=total, completed=done, note="")
        self.inner.start()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def update(self, done: int | None = None, note: str | None = None) -> None:
        """Moves the bar to `done`, and replaces the words behind it by `note`; None leaves either as it is."""
        if self.inner is not None:
            fields = {} if note is None else {"note": note}
            self.inner.update(self.task, completed=done, **fields)

    def close(self) -> None:
        if self.inner is not None:
            self.inner.stop()
            self.inner = None


def table(title: str, rows: Mapping[str, str]) -> None:
    """Prints names and values: a table in a terminal, a line each elsewhere; once, whatever the number of hosts."""
    if not hosts.is_first():
        return
    if not (rows and sys.stdout.isatty()):
        print(title, *(f"  {name}: {value}" for name, value in rows.items()), sep="\n", flush=True)
        return
    print(title)  # a title of rich's would be wrapped to the width of the table
    shown = Table(show_header=False)
    for name, value in rows.items():
        shown.add_row(Text(name), Text(value))
    Console(file=sys.stdout).print(shown)


def duration(seconds: float) -> str:
    """Seconds in words: "41 s", "12 min 3 s", "3 h 20 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"
