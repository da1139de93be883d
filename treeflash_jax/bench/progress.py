"""What a measurement is doing, on stderr from its start: one live line in a terminal, a line a step elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from rich import progress as bars
from rich.console import Console
from rich.table import Column

Tell = Callable[[str], None]
QUIET_SECONDS = 5.0  # where every detail would be a line of its own, they are at least so far apart


def nobody(text: str) -> None:
    """Discards progress messages."""


class Progress:
    """Counts the steps of a measurement and names the one it is at.

    Example:
      >>> with Progress(2) as progress:
      ...     progress.step("compiling")
      ...     progress.step("timing")
      ...     progress.detail("sample 3 of 9")
    """

    def __init__(self, steps: int, console: Console | None = None):
        """
        Args:
          steps: how many there will be.
          console: where to; stderr by default.
        """
        console = console or Console(stderr=True, highlight=False)
        self.steps, self.begun, self.text, self.console = steps, 0, "", console
        self.printed = time.monotonic()
        self.live = _live(console) if console.is_terminal and not console.is_dumb_terminal else None

    def __enter__(self) -> Progress:
        if self.live:
            self.live.start()
            self.bar = self.live.add_task("", total=self.steps)
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()

    def step(self, text: str) -> None:
        """Begins the next step."""
        self.begun, self.text = self.begun + 1, text
        self._show(text, is_due=True)

    def detail(self, text: str) -> None:
        """Says how far the step is."""
        self._show(f"{self.text}: {text}", is_due=time.monotonic() - self.printed >= QUIET_SECONDS)

    def _show(self, text: str, is_due: bool) -> None:
        if self.live:
            self.live.update(self.bar, completed=self.begun - 1, description=text)
        elif is_due:
            self.printed = time.monotonic()
            self.console.print(f"[{self.begun}/{self.steps}] {text}", markup=False, soft_wrap=True)


def _live(console: Console) -> bars.Progress:
    text = bars.TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
    columns = bars.SpinnerColumn(), bars.BarColumn(12), bars.MofNCompleteColumn(), bars.TimeElapsedColumn(), text
    # Results that are printed meanwhile go above the live line, unless they go to a file.
    return bars.Progress(*columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty())
