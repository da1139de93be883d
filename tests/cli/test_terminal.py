"""Control characters of models, files and users: escapes in messages and on terminals, raw in pipes."""

import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import PAIR
from model_files import change_json, change_tensors
from refusals import mistake, refused

import treeflash_jax as tf
from treeflash_jax.cli import chat, demo
from treeflash_jax.cli.commands import main
from treeflash_jax.core.terminal import Console
from treeflash_jax.engine import loading

RAW, SHOWN = "\x1b]0;owned\x9c", r"\x1b]0;owned\x9c"
ANSWER = replace(tf.Result.unanswered([1]), finished="length")


@pytest.fixture(params=[False, True], ids=["pipe", "terminal"])
def printed(request, capsys, monkeypatch):
    """Returns what a function prints, and what becomes of RAW there."""

    def run(function):
        monkeypatch.setattr(sys.stdout, "isatty", lambda: request.param)
        function()
        return capsys.readouterr().out, SHOWN if request.param else RAW

    return run


@pytest.mark.parametrize("prompts", [["a"], ["a", "--samples", "2"]], ids=["streamed", "at once"])
def test_answers(printed, tiny, monkeypatch, prompts):
    monkeypatch.setattr(loading, "load", lambda **_: tiny)
    monkeypatch.setattr(tiny, "stream", lambda *_, **__: [tf.Chunk(ids=[1], text=f"{RAW}\t", rounds=0), ANSWER])
    monkeypatch.setattr(tiny, "generate", lambda *_, **__: [replace(ANSWER, text=f"{RAW}\t")])
    text, expected = printed(lambda: main(["generate", *prompts]))
    assert text == f"{expected}\t\n"


def test_chats_demos_and_tables(printed):
    def run():
        console = Console(width=200, color_system=None)
        with chat.Lines(console) as lines:
            lines.write(f"{RAW}\n")
        chunk = tf.Chunk(ids=[1], text=f"demo {RAW}", rounds=0)
        model = SimpleNamespace(stream=lambda *_, **__: iter([chunk, ANSWER]))
        console.print(demo._race(console, [SimpleNamespace(name="tree", model=model, config=None)], "")[0])

    text, expected = printed(run)
    assert expected in text and f"demo {expected}" in text and (expected is RAW or RAW not in text)


def test_messages(capsys, tmp_path, caplog):
    mistake(capsys, main, ["generate", "--verifier", f"nowhere{RAW}", "a"], f"nowhere{SHOWN} not found")
    mistake(capsys, main, ["generate", f"--{RAW}"], f"unrecognized option --{SHOWN}")
    folder = shutil.copytree(PAIR / "verifier", tmp_path / f"folder{RAW}")
    change_json(folder / "config.json", unknown=1)
    change_tensors(folder, lambda tensors: tensors | {f"x{RAW}": np.zeros(1, np.float32)})
    refused(lambda: tf.load(folder), f"folder{SHOWN}", "unknown tensors: 1, the first is x")
    assert f"folder{SHOWN}" in caplog.messages[0] and caplog.messages[0].isprintable()
