"""README keeps its promises: the example runs as printed, commands parse, files it names exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from treeflash_jax import cli

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_works_as_printed(capsys):
    [example] = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(example.strip().splitlines()) <= 10
    exec(compile(example, "README.md", "exec"), {})
    assert re.search(r"tokens in \d+ rounds: tau \d", capsys.readouterr().out)


def test_two_commands_come_first():
    first, second = re.search(r"```sh\n(.*?)```", README, flags=re.DOTALL).group(1).strip().splitlines()
    assert first.startswith("python3 -m venv") and first.endswith("treeflash demo")
    assert second.startswith("python3 -m venv") and second.endswith("pytest")


def test_printed_commands_parse():
    commands = re.findall(r"^treeflash (.*)$", README, flags=re.MULTILINE)
    assert commands
    for command in commands:
        assert callable(cli._parser().parse_args(shlex.split(command)).run)


@pytest.mark.parametrize("option", sorted(set(re.findall(r"`(--[a-z-]+)", README))))
def test_named_options_exist(option, capsys):
    with pytest.raises(SystemExit):
        cli.main(["generate", "--help"])
    assert option in capsys.readouterr().out


def test_named_files_exist():
    for row in re.findall(r"^\| (`[a-z_]+[./].*?) \|", README, flags=re.MULTILINE):
        for name in re.findall(r"`([a-z_/]+(?:\.py|/))`", row):
            assert (ROOT / "treeflash_jax" / name).exists() or (ROOT / name).exists(), name
