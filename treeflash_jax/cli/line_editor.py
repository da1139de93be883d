"""Reading of turns that a user types in a terminal, with editing and a history. Pasted lines become one turn."""

import json
import os
import select
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from treeflash_jax.core import files

try:
    import readline
except ImportError:  # for example on Windows
    readline = None

MOST_TURNS = 1000  # most turns in the history
PASTE_SECONDS = 0.05  # longest pause between two lines of a paste
PROMPT = "you: "
BOLD = f"\x01\x1b[1m\x02{PROMPT}\x01\x1b[0m\x02"  # readline does not count characters between \x01 and \x02


class LineEditor:
    """Reads turns. In a terminal, readline edits them, and a file in the user's cache folder stores the history.

    Pasted lines become one turn. Terminals mark pasted text for readline. Without marks, lines that are already waiting
    after the first line was read count as pasted. Lines of a pipe or a file are a turn each.
    """

    def __init__(self):
        is_typed = sys.stdin is not None and sys.stdin.isatty()
        self.is_terminal = readline is not None and is_typed and sys.stdout.isatty()
        self.prompt = ""
        if self.is_terminal:
            self.prompt = BOLD
        elif is_typed:
            self.prompt = PROMPT
        self.path = None
        if not self.is_terminal:
            return
        readline.parse_and_bind("set enable-bracketed-paste on")
        readline.set_auto_history(False)  # `_remember` adds whole turns instead
        with suppress(OSError, RuntimeError, ValueError):  # no history yet, no home folder, or a damaged file
            self.path = files.user_cache() / "chat_history.jsonl"
            lines = self.path.read_text(encoding="utf-8").splitlines()
            if len(lines) > MOST_TURNS:
                lines = lines[-MOST_TURNS:]
                with tempfile.TemporaryDirectory(dir=self.path.parent) as folder:  # removed even if the disk is full
                    part = Path(folder) / self.path.name
                    part.touch(0o600)  # only the owner may read it
                    part.write_text("\n".join(lines) + "\n", encoding="utf-8")
                    os.replace(part, self.path)
            for line in lines:
                readline.add_history(str(json.loads(line)))

    def read(self) -> str:
        """Returns the next turn. Raises EOFError at the end of input, and KeyboardInterrupt after Ctrl-C."""
        if sys.stdin is None:
            raise EOFError
        lines = [input(self.prompt)]
        with suppress(EOFError):
            while self.is_terminal and select.select([sys.stdin], [], [], PASTE_SECONDS)[0]:
                lines.append(input())
        turn = "\n".join(lines).strip()
        if self.is_terminal and turn:
            self._remember(turn)
        return turn

    def _remember(self, turn: str) -> None:
        readline.add_history(turn)
        with suppress(OSError):  # the folder is not writable
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)  # only the owner may read it
                with open(descriptor, "w", encoding="utf-8") as file:
                    file.write(json.dumps(turn) + "\n")
