"""Chat in a real pseudo-terminal: pasted lines, edited lines, and the history of earlier conversations."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

import treeflash_jax
from treeflash_jax.cli import line_editor
from treeflash_jax.core import files

# A model that answers with the message it was given: `repr` shows its line breaks.
CODE = """
from types import SimpleNamespace
from rich.console import Console
import treeflash_jax as tf
from treeflash_jax.cli import chat

def stream(messages, session, **settings):
    yield tf.Chunk(ids=[1], text=f"<{messages[-1]['content']!r}>", rounds=0)
    yield tf.Result.unanswered([1])

model = SimpleNamespace(tokenizer=True, stream=stream, prepare=lambda *_, **__: None)
model.verifier = SimpleNamespace(max_positions=99)
chat.converse(model, Console(), max_new_tokens=9)
"""


class Terminal:
    """A process in a pseudo-terminal."""

    def __init__(self, cache: Path):
        self.descriptor, end = pty.openpty()
        package = str(Path(treeflash_jax.__file__).parents[1])
        environment = {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": package, "TERM": "xterm", "COLUMNS": "100"}
        streams = {"stdin": end, "stdout": end, "stderr": end, "start_new_session": True}
        self.process = subprocess.Popen([sys.executable, "-c", CODE], env=os.environ | environment, **streams)
        os.close(end)

    def read_until(self, pattern: str) -> str:
        """Returns what is printed until a pattern appears."""
        printed, deadline = "", time.monotonic() + 300
        while not re.search(pattern, printed, flags=re.DOTALL):
            assert select.select([self.descriptor], [], [], max(0.0, deadline - time.monotonic()))[0], printed
            printed += os.read(self.descriptor, 4096).decode()
        return printed

    def type(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def leave(self) -> None:
        self.type("/quit\r")
        assert self.process.wait(timeout=300) == 0


@pytest.fixture
def chat(tmp_path):
    """Starts a conversation in a terminal, with an empty history at first; returns it after its prompt is shown."""
    started = []

    def start() -> Terminal:
        terminal = Terminal(tmp_path)
        started.append(terminal)
        terminal.read_until("you: ")
        return terminal

    yield start
    for terminal in started:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.descriptor)


def answer(terminal: Terminal, text: str) -> str:
    """Types a message and returns it as the model received it."""
    terminal.type(text)
    return re.search(r"<'(.*?)'>", terminal.read_until("<'.*'>.*you: "))[1]


@pytest.mark.slow
def test_turns_are_edited_pasted_and_remembered(chat, tmp_path):
    terminal = chat()
    assert answer(terminal, "two wrds\x1b[D\x1b[D\x1b[Do\r") == "two words", "arrows move the cursor"
    assert answer(terminal, "\x1b[200~one\ntwo\n\x1b[201~three\r") == r"one\ntwo\nthree", "marked as a paste"
    assert answer(terminal, "\x1b[A\r") == r"one\ntwo\nthree", "recalled as a whole"
    terminal.type("/system Be short.\r")
    terminal.read_until("you: ")
    terminal.leave()
    history = tmp_path / "treeflash" / "chat_history.jsonl"
    assert history.stat().st_mode & 0o777 == 0o600
    earlier = [f'"turn {number}"' for number in range(1100)]
    history.write_text("\n".join([*earlier, history.read_text()]))
    written = history.stat().st_ino
    terminal = chat()
    assert history.stat().st_ino != written and history.stat().st_mode & 0o777 == 0o600, "another file in its place"
    assert [*history.parent.glob("tmp*")] == []
    assert answer(terminal, "\x1b[A" * 4 + "\r") == r"one\ntwo\nthree", "of the conversation before"
    terminal.leave()
    lines = history.read_text().splitlines()
    assert earlier[1000] in lines and earlier[99] not in lines and len(lines) <= 1002, "bounded when it is read"


def test_waiting_lines_are_one_turn_without_marks_of_a_paste(chat):
    terminal = chat()
    assert answer(terminal, "one\ntwo\nthree\n") == r"one\ntwo\nthree"
    terminal.leave()


def test_a_history_that_cannot_be_cut_stays_alone(own_cache, monkeypatch):
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr(line_editor, "readline", Mock())
    history = files.user_cache() / "chat_history.jsonl"
    history.parent.mkdir(parents=True)
    history.write_text(before := '"turn"\n' * 1100)
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError))
    line_editor.LineEditor()
    assert [*history.parent.iterdir()] == [history] and history.read_text() == before
