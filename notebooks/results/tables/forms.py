"""Forms that all tables share, and TABLES, to which each function that is `shown` adds itself."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent
TABLES: dict[str, Callable[[], str]] = {}  # by the name that pages give
GIB = 2**30
Rows = Iterable[Iterable[Any]]


def shown(function: Callable[[], str]) -> Callable[[], str]:
    """Adds a table under the name of its function."""
    TABLES[function.__name__.replace("_", "-")] = function
    return function


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def table(header: str, rows: Rows) -> str:
    """Formats a Markdown table; `header` separates its columns by "|"."""
    columns = [column.strip() for column in header.split("|")]
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def section(header: str, rows: Rows, note: str, commands: Iterable[str] = (), language: str = "sh") -> str:
    """Formats a table, a note on it, and the commands that made its numbers."""
    lines = [table(header, rows), "", note[0].upper() + note[1:]]
    return "\n".join(lines + (["", f"```{language}", *commands, "```"] if commands else []))


def interval(ratio: dict[str, float] | None) -> str:
    return "{value:.2f} [{low:.2f}, {high:.2f}]".format(**ratio) if ratio else ""
