"""Progress of a measurement on stderr: one live line in a terminal, a line per step elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

Notify = Callable[[str], None]


class Progress(Live):
    """Counts the steps of a measurement and names the current one.

    Example:
      >>> with Progress(2) as progress:
      ...     progress.step("compiling")
      ...     progress.step("timing")
      ...     progress.detail("sample 3 of 9")
    """

    def __init__(self, steps: int, console: Console | None = None):
        self.steps, self.number, self.text, self.spinner = steps, 0, "", Spinner("dots")
        console = console or Console(stderr=True, highlight=False)
        # Results that are printed meanwhile stay on stdout if that is a file.
        super().__init__(self.spinner, console=console, transient=True, redirect_stdout=sys.stdout.isatty())

    def step(self, text: str) -> None:
        self.number, self.text = self.number + 1, f"[{self.number + 1}/{self.steps}] {text}"
        self.spinner.update(text=Text(self.text))
        if not self.console.is_interactive:
            self.console.print(self.text, markup=False, soft_wrap=True)

    def detail(self, text: str) -> None:
        """Shows the state of the current step, in a terminal only."""
        self.spinner.update(text=Text(f"{self.text}: {text}"))
