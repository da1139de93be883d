"""The exit status of a command line: closed pipes, Ctrl-C, bad input, and machines without the requested devices."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from answers import slow

from treeflash_jax.core.exit_status import exit_status

ROOT = Path(__file__).parents[2]


def raising(error):
    def command():
        raise error

    return command


def test_a_command_ends_with_its_status_or_that_of_its_error(capsys):
    assert exit_status(lambda: None, "x") == 0 and exit_status(lambda: 3, "x") == 3
    assert exit_status(raising(KeyboardInterrupt()), "x") == 128 + signal.SIGINT
    assert capsys.readouterr() == ("", "")
    assert exit_status(raising(ValueError("got 1,\nexpected 2")), "x") == 2
    assert capsys.readouterr() == ("", "x: error: got 1, expected 2\n")
    with pytest.raises(RuntimeError, match="a bug"):  # as long as there are devices
        exit_status(raising(RuntimeError("a bug")), "x")


def test_a_device_without_enough_memory_is_one_line(capsys):
    """XLA's message goes on with what lies in the device's memory."""
    reason = "RESOURCE_EXHAUSTED: Out of memory trying to allocate 9.00GiB.\n" + "Allocations: ...\n" * 100
    assert exit_status(raising(jax.errors.JaxRuntimeError(reason)), "x") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("x: error: got too little memory on the device (RESOURCE_EXHAUSTED: Out of memory trying to")
    assert line.endswith("; use a smaller batch, context or dtype, or a mesh of more devices") and len(line) < 330


def test_a_machine_without_devices_is_one_line(monkeypatch, capsys):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr("jax.local_devices", raising(AssertionError()))
    assert exit_status(raising(RuntimeError("The TPU is\nin use")), "x") == 2
    assert capsys.readouterr() == ("", "x: error: JAX found no device (The TPU is in use); set JAX_PLATFORMS=cpu\n")


@pytest.mark.parametrize("words", [
    slow(["-m", "train.head", "--help"]),
    ["-c", "from treeflash_jax.core.exit_status import exit_status; exit(exit_status(lambda: print('x' * 100_000), 'x'))"],
])  # fmt: skip
def test_a_reader_that_has_ended_ends_the_command_quietly(words):
    """Text that is still in Python's buffer, and more than fits there."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = subprocess.run([sys.executable, *words], stdout=writing, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("command, platform", [
    ("treeflash_jax generate --verifier tiny Hello", "cuda"),
    slow("train.head configs/tiny/head.toml", "none"),
])  # fmt: skip
def test_a_platform_that_is_not_here_is_one_line(command, platform, tmp_path):
    environment = os.environ | {"JAX_PLATFORMS": platform, "TREEFLASH_TESTS_CACHE": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-m", *command.split()], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert ended.returncode == 2 and ended.stdout == "" and ended.stderr.count("\n") == 1, ended.stderr
    assert f"error: got JAX_PLATFORMS={platform}, expected one that this machine has" in ended.stderr
