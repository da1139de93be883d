"""Progress of a measurement on stderr: one live line in a terminal, a line per step elsewhere."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.markup import escape

Notify = Callable[[str], None]


class Progress:
    """Counts the steps of a measurement and names the current one.

    Example:
      >>> with Progress(2) as progress:
      ...     progress.step("compiling")
      ...     progress.step("timing")
      ...     progress.detail("sample 3 of 9")
    """

    def __init__(self, steps: int, console: Console | None = None):
        self.steps, self.number, self.text = steps, 0, ""
        self.console = console or Console(stderr=True, highlight=False)
        self.live = self.console.status("")
        self.is_live = self.console.is_terminal and not self.console.is_dumb_terminal

    def __enter__(self) -> Progress:
        if self.is_live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def step(self, text: str) -> None:
        self.number, self.text = self.number + 1, f"[{self.number + 1}/{self.steps}] {text}"
        self.live.update(escape(self.text))
        if not self.is_live:
            self.console.print(self.text, markup=False, soft_wrap=True)

    def detail(self, text: str) -> None:
        """Shows the state of the current step, in a terminal only."""
        self.live.update(escape(f"{self.text}: {text}"))
